"""Runs the command line inside the test's process, as `main` would: arguments in, exit code and output out."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from fusefs.cli import main

_MEASURED = """
import pathlib, re, sys
from fusefs.cli import main
code = main.run(sys.argv[1:])
status = pathlib.Path("/proc/self/status").read_text()
print(re.search(r"VmHWM:\\s+(\\d+)", status)[1], file=sys.stderr)
sys.exit(code)
"""
MEASURED = (sys.executable, "-c", _MEASURED)
"""A command line that runs `fusefs` and then prints its peak memory in KiB to stderr. VmHWM is of this program alone;
ru_maxrss is at least what the process that started it had."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one command did."""

    code: int
    stdout: bytes
    stderr: str

    @property
    def text(self) -> str:
        return self.stdout.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


class Fusefs:
    """`fusefs("df", "--json")` runs a command with the test's environment and database."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def __call__(self, *args: str, stdin: bytes = b"", check: bool = True) -> Result:
        out, err = io.BytesIO(), io.BytesIO()
        with self._patch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
            patch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="utf-8", write_through=True))
            patch.setattr(sys, "stderr", io.TextIOWrapper(err, encoding="utf-8", write_through=True))
            code = main.run(list(args))
            result = Result(code, out.getvalue(), err.getvalue().decode())
        assert "Traceback" not in result.stderr, result.stderr
        if check:
            assert code == 0, result.stderr
        return result

    def fails(self, code: int, *args: str, stdin: bytes = b"") -> str:
        """Run a command that must end with this exit code; returns its stderr."""
        result = self(*args, stdin=stdin, check=False)
        assert result.code == code, (result.code, result.stderr)
        assert "fusefs: " in result.stderr
        return result.stderr
