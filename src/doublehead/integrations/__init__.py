"""The method in other frameworks: Lightning, Transformers, scikit-learn, trackers, exports.

Each module needs its own package and names the extra to install where that is missing.
"""
