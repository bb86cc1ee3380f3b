"""doublehead: deep classifiers that tell the truth about their confidence."""

__version__ = "0.1.0"
