"""Who asks: tenant, agent, session and principal.

Decided here and only here: what a valid scope is. A scope is made once, at a door, and passed first
to every function below it. It fails closed (HF-15): nothing has a default.

Threading: frozen values, safe anywhere.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from enum import Enum

from fusefs.rules.errors import BadScope

_SESSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Principal(Enum):
    """What kind of caller acts."""

    AGENT = "agent"
    MEMBER = "member"
    ADMIN = "admin"
    OWNER = "owner"
    SYSTEM = "system"

    @property
    def administers(self) -> bool:
        return self in (Principal.ADMIN, Principal.OWNER, Principal.SYSTEM)


def valid_session(session: str) -> bool:
    """Whether `session` may name a session: it becomes a folder and the stem of a history file."""
    return _SESSION.fullmatch(session) is not None and not session.endswith(".md")


def new_session() -> str:
    """A fresh session id."""
    return f"s-{uuid.uuid4().hex[:16]}"


def _uuid_text(what: str, value: str) -> str:
    try:
        return str(uuid.UUID(value))
    except (ValueError, AttributeError, TypeError):
        raise BadScope(f"the {what} id is not a UUID") from None


@dataclass(frozen=True, slots=True)
class Scope:
    """Tenant, agent, session and principal of one caller.

    Args:
        tenant_id, agent_id: UUIDs as text; normalised.
        session: see `valid_session`.
        principal: the kind of caller.
        all_sessions: sees every session's machine-written files; administrators only.

    Raises BadScope for anything missing or malformed.
    """

    tenant_id: str
    agent_id: str
    session: str
    principal: Principal
    all_sessions: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tenant_id", _uuid_text("tenant", self.tenant_id))
        object.__setattr__(self, "agent_id", _uuid_text("agent", self.agent_id))
        if not isinstance(self.session, str) or not valid_session(self.session):
            raise BadScope("the session id must match [A-Za-z0-9][A-Za-z0-9._-]{0,63} and not end in .md")
        if not isinstance(self.principal, Principal):
            raise BadScope("the principal is not one of agent, member, admin, owner, system")
        if self.all_sessions and not self.principal.administers:
            raise BadScope("only an administrator sees every session")

    def log_context(self) -> dict[str, str]:
        """The fields that a log line or span carries."""
        return {
            "hango.tenant.id": self.tenant_id,
            "hango.agent.id": self.agent_id,
            "session": self.session,
            "principal": self.principal.value,
        }
