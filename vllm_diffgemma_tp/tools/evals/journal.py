# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""One journal file per T; each finished question is appended, so none is lost."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Session:
    """One run of a server; an evaluation that was interrupted has several."""

    server_command: list[str]
    plugin_version: str
    vllm_version: str
    model_version: str


@dataclass(frozen=True)
class Reply:
    """The answer to a question; times are in seconds since the server's start."""

    index: int
    session: int
    text: str
    prompt_tokens: int
    completion_tokens: int
    sent: float
    received: float


@dataclass(frozen=True)
class Failure:
    """A request that was not answered."""

    index: int
    session: int
    reason: str


Record = Session | Reply | Failure
_KINDS: dict[str, type[Record]] = {
    kind.__name__: kind for kind in (Session, Reply, Failure)
}


class Journal:
    """All records of one T so far, on disk and in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.sessions: list[Session] = []
        self.replies: dict[int, Reply] = {}
        self.failures: list[Failure] = []
        for values in read_lines(path):
            self._keep(_KINDS[values.pop("kind")](**values))

    def add(self, record: Record) -> None:
        """Append a record to the file."""
        values = {"kind": type(record).__name__, **asdict(record)}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        self._keep(record)

    def request_id(self, index: int) -> str:
        """The id of the request for a question in the latest session."""
        return f"question-{index}-session-{len(self.sessions)}"

    def wall_seconds(self) -> float:
        """Total of the times from each session's start to its last answer."""
        return sum(replies[-1].received for replies in self._by_session())

    def request_seconds(self) -> float:
        """Total of the times from each session's first request to its last answer."""
        return sum(
            replies[-1].received - min(reply.sent for reply in replies)
            for replies in self._by_session()
        )

    def _by_session(self) -> list[list[Reply]]:
        sessions: dict[int, list[Reply]] = {}
        for reply in sorted(self.replies.values(), key=lambda reply: reply.received):
            sessions.setdefault(reply.session, []).append(reply)
        return list(sessions.values())

    def _keep(self, record: Record) -> None:
        match record:
            case Session():
                self.sessions.append(record)
            case Reply():
                self.replies[record.index] = record
            case Failure():
                self.failures.append(record)


def read_lines(path: Path) -> list[dict]:
    """Read the JSON lines of a file; empty if the file does not exist.

    An incomplete last line, left by an interrupted write, is removed from the file, so
    that the next line does not continue it.
    """
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        path.write_bytes(whole)
    return [json.loads(line) for line in whole.splitlines()]
