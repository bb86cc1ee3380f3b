"""The report: one self-contained HTML page that says whether confidences can be trusted."""

from doublehead.report.build import build_report, write_report

__all__ = ["build_report", "write_report"]
