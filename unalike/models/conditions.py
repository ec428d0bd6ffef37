"""Conditions under which labels go together ("background", "object pose"): shipped, read, or asked of a language model. Knows no methods.

The pipeline of FedMPT (section 4.1, Figure 3), against any server that speaks OpenAI's chat completions: describe every combination of
classes in a sentence, then sum the sentences up in a few abstract conditions.
"""

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from unalike.base.errors import UserError

SHIPPED = (
    "spatial layout",
    "object pose",
    "background",
    "lighting",
    "object scale",
)  # Figure 3, "lighting/weather" as one word
DESCRIBE = "Please give a detailed description for each possible combination of the following categories in one sentence. {}"
SUM_UP = (
    "Given these descriptions, please summarize {count} distinct and general conditions under which true class correlations can be "
    "reliably represented. Answer with a numbered list of {count} abstract conditions of one to three words each, and nothing else, "
    "as in: 1. spatial layout\n\n{descriptions}"
)
SENTENCES = 400  # at most so many go into the second question, evenly chosen
LONGEST = 5  # words of a condition
BUSY = (429, 500, 502, 503, 504)


def query_conditions(
    classes: Sequence[str],
    endpoint: str,
    model: str,
    count: int = 5,
    timeout: float = 60.0,
    watch: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The conditions, and where they come from: what `write` keeps. One question a class, and one to sum up."""
    names = list(dict.fromkeys(name.strip() for name in classes if name.strip()))
    if len(names) < 2:
        raise UserError(
            f"conditions are about classes that go together: name two or more, got {', '.join(names) or 'none'}"
        )
    if count < 1:
        raise UserError(f"ask for one condition or more, got {count}")
    where = redact_url(endpoint)
    questions = [
        DESCRIBE.format(f"Combine {name} with each of: {', '.join(names[i + 1 :])}")
        for i, name in enumerate(names[:-1])
    ]
    sentences: list[str] = []
    for i, query in enumerate(questions):
        watch(f"describing {names[i]} with {len(names) - i - 1} others")
        sentences += [
            line.strip()
            for line in answer(query, endpoint, model, timeout).splitlines()
            if line.strip()
        ]
    if not sentences:
        raise UserError(f"{model} described nothing: try another model")
    step = max(1, -(-len(sentences) // SENTENCES))
    watch(f"summing up {len(sentences)} descriptions")
    summary = answer(
        SUM_UP.format(count=count, descriptions="\n".join(sentences[::step])),
        endpoint,
        model,
        timeout,
    )
    return {
        "conditions": parse_list(summary, count, model),
        "provenance": {
            "model": model,
            "endpoint": where,
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "classes": names,
            "questions": [*questions, SUM_UP.format(count=count, descriptions="...")],
            "descriptions": sentences,
            "summary": summary,
        },
    }


def answer(query: str, endpoint: str, model: str, timeout: float, attempts: int = 3) -> str:
    """What the model says. A busy server is asked again, a little later each time."""
    url = f"{endpoint.rstrip('/')}/chat/completions"
    body = json.dumps(
        {"model": model, "temperature": 0, "messages": [{"role": "user", "content": query}]}
    ).encode()
    key = os.environ.get("UNALIKE_API_KEY")
    headers = {
        "Content-Type": "application/json",
        **({"Authorization": f"Bearer {key}"} if key else {}),
    }
    where = redact_url(endpoint)
    for attempt in range(1, attempts + 1):
        try:
            raw = received(Request(url, body, headers), timeout)
            break
        except HTTPError as problem:
            if problem.code in BUSY and attempt < attempts:
                time.sleep(min(attempt, timeout))
                continue
            hint = {
                401: "; put its key in UNALIKE_API_KEY",
                403: "; put its key in UNALIKE_API_KEY",
                404: "; is the path right?",
            }
            said = problem.read(200).decode(errors="replace").strip().splitlines()
            raise UserError(
                f"{where} answered {problem.code} {problem.reason}{hint.get(problem.code, '')}"
                f"{f': {said[0]}' if said else ''}"
            ) from None
        except TimeoutError:
            raise UserError(
                f"{where} did not answer within {timeout:g} s: raise --timeout, or ask a faster model"
            ) from None
        except HTTPException as problem:
            raise UserError(
                f"{where} does not speak HTTP as it should ({type(problem).__name__}): is it a chat server?"
            ) from None
        except (URLError, OSError, ValueError) as problem:
            why = getattr(problem, "reason", problem)
            if isinstance(why, TimeoutError):
                raise UserError(
                    f"{where} did not answer within {timeout:g} s: raise --timeout, or ask a faster model"
                ) from None
            raise UserError(f"{where} cannot be reached ({why}): is the server running?") from None
    try:
        text = json.loads(raw)["choices"][0]["message"]["content"]
        if not isinstance(text, str):
            raise TypeError
        return text
    except (ValueError, KeyError, IndexError, TypeError):
        begins = raw[:60].decode(errors="replace")
        raise UserError(
            f"{where} gave no chat completion but {begins!r}: name an OpenAI-compatible endpoint, one ending in /v1"
        ) from None


def received(request: Request, timeout: float) -> bytes:
    """The whole answer, in `timeout` seconds in all: a server that drips is as good as silent."""
    told: SimpleQueue[bytes | Exception] = SimpleQueue()

    def ask() -> None:
        try:
            with urlopen(request, timeout=timeout) as reply:
                told.put(reply.read())
        except Exception as problem:  # told where somebody waits for it
            told.put(problem)

    Thread(target=ask, daemon=True).start()
    try:
        said = told.get(timeout=timeout)
    except Empty:
        raise TimeoutError from None
    if isinstance(said, Exception):
        raise said
    return said


def parse_list(summary: str, count: int, model: str) -> list[str]:
    """The conditions of an answer: a list with numbers or dashes, or names with commas between.

    >>> parse_list("Here they are:\\n1. **Spatial layout**: where things are\\n2) Object pose.", 2, "a model")
    ['spatial layout', 'object pose']
    """
    marked = [
        found[1]
        for line in summary.splitlines()
        if (found := re.match(r"\s*(?:\d+[.)]|[-*•])\s+(.+)", line))
    ]
    pieces = marked or re.split(r"[,;\n]", summary)
    names = [
        re.sub(r"\s+", " ", re.sub(r"[*_`\"]", "", re.split(r"[:–—(]| - ", piece)[0]))
        .strip(" .,;")
        .lower()
        for piece in pieces
    ]
    good = list(
        dict.fromkeys(
            name
            for name in names
            if name and re.search(r"[^\W\d]", name) and len(name.split()) <= LONGEST
        )
    )
    if len(good) < count:
        raise UserError(
            f"{model} was asked for {count} conditions and gave {len(good)} that can be read"
            f"{f' ({chr(44).join(good)})' if good else ''}: ask again, for fewer with --count, or another model. "
            f"It said: {summary.strip()[:120]!r}"
        )
    return good[:count]


def write_conditions(path: Path, made: dict[str, Any]) -> None:
    import yaml

    told = yaml.safe_dump(made, sort_keys=False, allow_unicode=True, width=120)
    path.write_text(f"# Conditions for FedMPT, made by `unalike conditions`\n{told}")


def read_conditions(path: str | Path) -> tuple[str, ...]:
    """The conditions of a file that `write` made, or anyone with a list `conditions:`."""
    import yaml

    try:
        held = yaml.safe_load(Path(path).read_text())
    except FileNotFoundError:
        raise UserError(
            f"there is no file {path}; a single condition is a list of one, [{path}]"
        ) from None
    except (OSError, UnicodeError, yaml.YAMLError) as problem:
        raise UserError(f"{path} cannot be read as YAML: {str(problem).splitlines()[0]}") from None
    names = held.get("conditions") if isinstance(held, dict) else None
    if (
        not isinstance(names, list)
        or not names
        or not all(isinstance(name, str) and name.strip() for name in names)
    ):
        raise UserError(
            f"{path} needs a list `conditions:` of one or more names; `unalike conditions` writes one"
        )
    return tuple(names)


def redact_url(endpoint: str) -> str:
    """The endpoint without a name and password."""
    try:
        parts = urlsplit(endpoint)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:  # of a port, or of brackets
        parts, port = urlsplit(""), ""
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"an endpoint is a URL such as http://localhost:8000/v1, got {endpoint!r}")
    return f"{parts.scheme}://{parts.hostname}{port}{parts.path}"
