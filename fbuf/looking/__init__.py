"""Looking into a buffer: what it holds, what can be drawn, and why a slot cannot be."""

from fbuf.looking.column_summary import BLOCK, ColumnSummary, Total, evenly, rows_of, summarize
from fbuf.looking.description import Description
from fbuf.looking.episode_summary import EpisodeSummary
from fbuf.looking.of_buffer import describe, why
from fbuf.looking.quantiles import Quantiles
from fbuf.looking.sampling_summary import SamplingSummary
from fbuf.looking.slot_facts import StoredTrajectory, Why
from fbuf.page_tables import Section, html_page, text_page

__all__ = [
    "BLOCK",
    "ColumnSummary",
    "Description",
    "EpisodeSummary",
    "Quantiles",
    "SamplingSummary",
    "Section",
    "StoredTrajectory",
    "Total",
    "Why",
    "describe",
    "evenly",
    "html_page",
    "rows_of",
    "summarize",
    "text_page",
    "why",
]
