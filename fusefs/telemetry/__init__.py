"""Logs, spans, metrics and counters (layer 1): what an operator sees, never what a file holds."""

from fusefs.telemetry.counters import Counters, counters
from fusefs.telemetry.logs import get_logger, setup_logging
from fusefs.telemetry.metrics import configure, is_measuring, register_file_count
from fusefs.telemetry.operations import Operation, operation
from fusefs.telemetry.results import observe_result
from fusefs.telemetry.toolcalls import ToolCallSpan, add_event, tool_call

__all__ = [
    "Counters",
    "Operation",
    "ToolCallSpan",
    "add_event",
    "configure",
    "counters",
    "get_logger",
    "is_measuring",
    "observe_result",
    "operation",
    "register_file_count",
    "setup_logging",
    "tool_call",
]
