"""Errors: each class has its form at every door, and an unknown exception gives nothing away."""

from __future__ import annotations

import errno

import pytest

from fusefs.rules import errors
from fusefs.rules.config import Limits
from fusefs.rules.errors import BadConfig, FsError, NotFound, StaleVersion, Unavailable, all_errors, outcome

TABLE = {
    # class: errno, HTTP status, exit code
    "NotFound": (errno.ENOENT, 404, 3),
    "UnknownScope": (errno.ENOENT, 404, 3),
    "Exists": (errno.EEXIST, 409, 4),
    "NotADirectory": (errno.ENOTDIR, 400, 5),
    "IsADirectory": (errno.EISDIR, 400, 5),
    "NotEmpty": (errno.ENOTEMPTY, 409, 5),
    "StaleVersion": (errno.ESTALE, 409, 6),
    "Denied": (errno.EACCES, 403, 7),
    "ReadOnly": (errno.EROFS, 403, 7),
    "NotPermitted": (errno.EPERM, 403, 7),
    "TooLarge": (errno.EFBIG, 413, 8),
    "OverQuota": (errno.EDQUOT, 507, 8),
    "PathTooLong": (errno.ENAMETOOLONG, 400, 9),
    "BadName": (errno.EILSEQ, 400, 9),
    "BadPath": (errno.EINVAL, 400, 9),
    "NotSupported": (errno.EOPNOTSUPP, 400, 9),
    "CrossDevice": (errno.EXDEV, 400, 9),
    "BadScope": (errno.EACCES, 400, 10),
    "Unavailable": (errno.EIO, 503, 11),
    "Corrupt": (errno.EIO, 500, 12),
    "SchemaMismatch": (errno.EIO, 503, 13),
    "MountFailed": (errno.EIO, 500, 14),
    "RescueFailed": (errno.EIO, 500, 15),
    "ModelFailed": (errno.EIO, 502, 16),
    "BadConfig": (errno.EINVAL, 400, 2),
    "AlreadyChanged": (errno.ESTALE, 409, 6),
    "BadText": (errno.EILSEQ, 400, 9),
    "BadPattern": (errno.EINVAL, 400, 9),
    "TooExpensive": (errno.ETIMEDOUT, 400, 17),
    "NoMatch": (errno.EINVAL, 409, 18),
    "NotUnique": (errno.EINVAL, 409, 18),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_table_of_errors(name: str) -> None:
    found = outcome(getattr(errors, name)())
    assert (found.errno, found.http, found.exit_code) == TABLE[name]
    assert found.error_type == name


def test_the_table_is_complete() -> None:
    defined = {cls.__name__ for cls in all_errors() if cls.__module__ == errors.__name__}
    assert defined == {"FsError", *TABLE}


@pytest.mark.parametrize("cls", all_errors(), ids=lambda cls: cls.__name__)
def test_every_class_is_documented_and_has_a_form_at_every_door(cls: type[FsError]) -> None:
    assert cls.__doc__
    assert cls.errno in errno.errorcode
    assert 400 <= cls.http <= 599
    # 0 is success, 128 and more are signals, and 70 is what an unforeseen exception gives.
    assert 1 <= cls.exit_code <= 127
    assert cls.exit_code != 70
    assert cls.hint == "" or cls.hint.endswith(".")


@pytest.mark.parametrize("name", TABLE)
def test_the_default_message_is_the_docstring(name: str) -> None:
    cls = getattr(errors, name)
    message = str(cls())
    assert "\n" not in message
    assert not message.endswith(".")
    if cls is not StaleVersion:
        assert message == cls.__doc__.splitlines()[0].rstrip(".")


def test_a_message_names_the_path_and_a_given_hint_replaces_the_default() -> None:
    found = outcome(NotFound("gone", path="/a", hint="Look elsewhere."))
    assert (found.text, found.hint) == ("/a: gone", "Look elsewhere.")
    assert outcome(errors.TooLarge()).hint == errors.TooLarge.hint != ""


def test_a_stale_version_says_both_versions() -> None:
    error = StaleVersion(path="/a", expected=3, actual=5)
    assert (error.expected, error.actual) == (3, 5)
    assert str(error) == (
        "/a: changed since you read it; read it again and retry (you had version 3, it is at version 5 now)"
    )
    assert "(you had no file, it is at version 1 now)" in str(StaleVersion(expected=None, actual=1))
    assert "there is no file now" in str(StaleVersion(expected=2, actual=None))


@pytest.mark.parametrize(
    "foreign", [ValueError("secret"), OSError(errno.ENOENT, "secret"), KeyError("secret"), KeyboardInterrupt("secret")]
)
def test_a_foreign_exception_is_our_fault_and_says_nothing_else(foreign: BaseException) -> None:
    found = outcome(foreign)
    assert (found.errno, found.http, found.exit_code) == (errno.EIO, 500, 70)
    assert found.error_type == type(foreign).__name__
    assert "secret" not in found.text + found.hint


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_file_bytes", 0),
        ("max_file_bytes", 1024**3 + 1),
        ("max_path_depth", 0),
        ("max_path_depth", 513),
    ],
)
def test_limits_out_of_bounds_are_refused(field: str, value: int) -> None:
    with pytest.raises(BadConfig, match="HANGO_FS_MAX_"):
        Limits(**{field: value})


def test_default_limits() -> None:
    limits = Limits()
    assert (limits.max_file_bytes, limits.max_path_depth, limits.max_path_bytes, limits.max_name_bytes) == (
        1048576,
        64,
        1024,
        255,
    )


def test_a_sentence_says_what_can_be_done() -> None:
    assert outcome(NotFound("gone", path="/a", hint="Look elsewhere.")).sentence == "/a: gone. Look elsewhere."
    assert outcome(NotFound(path="/a")).sentence == "/a: No such file or directory."


def test_a_model_is_told_no_host() -> None:
    found = outcome(Unavailable("no answer at db.internal:5432"))
    assert found.sentence.startswith("no answer at db.internal:5432. Check")
    assert found.sentence_for_model == "Postgres does not answer. Try again later."
