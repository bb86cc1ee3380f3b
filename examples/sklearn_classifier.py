"""scikit-learn: a calibrated network on arrays, calibrators around any classifier, ECE as a score."""

from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from doublehead.integrations.sklearn import CalibratedClassifier, DoubleHeadClassifier, ece_scorer

X, y = load_digits(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.4, stratify=y, random_state=0)


def show(name, model):
    print(
        f"{name:14s} accuracy {model.score(X_test, y_test):.3f}  ECE {-ece_scorer(model, X_test, y_test):.3f}"
    )


show("network", DoubleHeadClassifier(hidden=(64,), epochs=50, lr=3e-3, random_state=0).fit(X_train, y_train))
show("naive Bayes", make_pipeline(StandardScaler(), GaussianNB()).fit(X_train, y_train))
calibrated = CalibratedClassifier(GaussianNB(), random_state=0)
show("+ calibration", make_pipeline(StandardScaler(), calibrated).fit(X_train, y_train))

search = GridSearchCV(GaussianNB(), {"var_smoothing": [1e-9, 1e-3, 1e-1]}, scoring=ece_scorer).fit(
    X_train, y_train
)
print("best by ECE:", search.best_params_)
