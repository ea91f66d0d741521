"""The report of a run: one self-contained HTML file."""

from mcp_rl.report.page import build_report

__all__ = ["build_report"]
