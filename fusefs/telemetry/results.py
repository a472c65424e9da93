"""What is recorded of the results of tools (HF-18): their tokens, and that one was too long.

Decided here and only here: the span event `tool.result_offloaded` and its attributes. It goes on the current span,
which is the tool call's. Paths and sizes are recorded, contents never.

Threading: called on the trio thread, in the task of the call.
"""

from __future__ import annotations

from fusefs.rules.results import Offloaded
from fusefs.telemetry import metrics
from fusefs.telemetry.counters import counters
from fusefs.telemetry.toolcalls import add_event


def observe_result(tool: str, result: Offloaded) -> None:
    """Count one result of a tool."""
    if metrics.active is not None:
        metrics.active.record_tokens(result.tokens_before)
    if not result.was_long:
        return
    counters.result_offloads[result.error_type] += 1
    attributes: dict[str, str | int] = {
        "gen_ai.tool.name": tool,
        "hango.tokens.before": result.tokens_before,
        "hango.tokens.after": result.tokens_after,
    }
    if result.path is not None:
        attributes["hango.fs.path"] = result.path
    if result.error_type:
        attributes["error.type"] = result.error_type
    add_event("tool.result_offloaded", attributes)
