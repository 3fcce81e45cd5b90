"""Whether a model's chat template says all that a conversation holds. What it would leave out is refused, not dropped."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

# Words that no template has of its own.
CONTENT, NAME = "outridercontent{}x", "outridername{}x"

Message = Mapping[str, str]
Options = Mapping[str, Any]
Render = Callable[[list[dict[str, str]], Options], str]
# What matters of a message here: its role, and whether it has a name.
Shape = tuple[tuple[str, bool], ...]


class LeftOutError(Exception):
    """What the template does not say, and what to do: the rest of a sentence that begins with the template."""


def refuse_unknown(variables: Collection[str], options: Options) -> None:
    """Options that the template does not ask for would change nothing."""
    for name in options:
        if name not in variables:
            known = f"it knows {', '.join(sorted(variables))}" if variables else "it knows no such options"
            raise LeftOutError(f'does not ask for "{name}" of "chat_template_kwargs" ({known}); remove it')


def refuse_left_out(render: Render, messages: Sequence[Message], options: Options) -> None:
    shape = tuple((message["role"], "name" in message) for message in messages)
    refusal = _left_out(render, shape, json.dumps(options, sort_keys=True))
    if refusal is not None:
        raise LeftOutError(refusal)


@lru_cache(maxsize=1024)
def _left_out(render: Render, shape: Shape, options_text: str) -> str | None:
    """Tried with words of our own, so once for each way in which conversations are put together."""
    options = json.loads(options_text)
    try:
        text = render(_tried(shape), options)
    except Exception:  # a template may refuse such words; the row's own are rendered anyway, and refused in its own words
        return None
    for index, (role, named) in enumerate(shape):
        if CONTENT.format(index) not in text:
            return f'leaves out what the role "{role}" of messages[{index}] says; remove it'
        if named and NAME.format(index) not in text and render(_tried(shape, without=index), options) == text:
            return f'knows no "name" for the role "{role}" of messages[{index}]; remove it'
    return None


def _tried(shape: Shape, without: int | None = None) -> list[dict[str, str]]:
    return [
        {"role": role, "content": CONTENT.format(index)}
        | ({"name": NAME.format(index)} if named and index != without else {})
        for index, (role, named) in enumerate(shape)
    ]
