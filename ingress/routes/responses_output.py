"""What a model wrote -> the items of a response, told piece by piece as they come about."""

from typing import Protocol

from ingress.family import Admitted, Choice
from ingress.response_items import CallItem, ItemStatus, MessageItem, OutputText
from ingress.routes.openai import ContentLogprob, chat_logprobs
from ingress.tool_calls import Arguments, Begin, Content, Piece, new_parser
from ingress.tool_calls.whole import call_id
from shared.wire import Logprob

OutputItem = MessageItem | CallItem


class Listener(Protocol):
    """Is told of each item as it begins, grows and ends; `index` is its place in the output."""

    def begun(self, index: int, item: OutputItem) -> None: ...

    def text(self, index: int, item: MessageItem, text: str, logprobs: list[ContentLogprob]) -> None: ...

    def arguments(self, index: int, item: CallItem, text: str) -> None: ...

    def done(self, index: int, item: OutputItem) -> None: ...


class Output:
    """The output of one response. What comes of it does not depend on how its tokens were batched."""

    def __init__(self, admitted: Admitted, listener: Listener | None = None) -> None:
        framing, self._rid = admitted.framing, admitted.request.rid
        self._parser = new_parser(framing.tools, framing.one_call) if framing.tools else None
        self._listener = listener
        self._items: list[OutputItem] = []  # the last one may be open
        self._open = False
        self._part = OutputText("")  # of the message that is open
        self._texts: list[str] = []  # of the open item
        self._scored: list[Logprob] = []  # tokens whose text has not come, or is none
        self.status: ItemStatus = "in_progress"

    def add(self, text: str, logprobs: list[Logprob] | None) -> None:
        """One token's."""
        if logprobs:
            if self._in_call:
                self._scored.clear()  # calls have no log probabilities
            self._scored += logprobs
        for piece in self._pieces(text):
            self._take(piece)

    def end(self, finish: str | None) -> None:
        """There is no more of it. Nothing at all is a message without text, as in a chat completion."""
        for piece in [] if self._parser is None else self._parser.flush():
            self._take(piece)
        if not self._items or (self._scored and self._open and not self._in_call):
            self._take(Content(""))
        self.status = "incomplete" if finish == "length" else "completed"
        self._close(self.status)

    def items(self) -> list[OutputItem]:
        """All of them; one that goes on is incomplete."""
        if self._open:
            self._fill(self._items[-1], "incomplete")
        return self._items

    @property
    def _in_call(self) -> bool:
        return self._open and isinstance(self._items[-1], CallItem)

    def _pieces(self, text: str) -> list[Piece]:
        if self._parser is not None:
            return self._parser.push(text)
        return [Content(text)] if text or self._scored else []

    def _take(self, piece: Piece) -> None:
        match piece:
            case Content():
                self._take_text(piece.text)
            case Begin():
                identity = call_id(self._rid, 0, piece.index)
                self._begin(CallItem(self._id("fc_"), identity, piece.name, "", "in_progress"))
                self._scored.clear()
            case Arguments():
                item = self._items[-1]
                assert isinstance(item, CallItem), "arguments follow the begin of their call"
                self._texts.append(piece.text)
                if self._listener is not None:
                    self._listener.arguments(len(self._items) - 1, item, piece.text)

    def _take_text(self, text: str) -> None:
        if not self._open or self._in_call:
            self._begin(MessageItem(self._id("msg_"), "assistant", [], "in_progress"))
        item = self._items[-1]
        assert isinstance(item, MessageItem), "no call is open"
        logprobs: list[ContentLogprob] = chat_logprobs(self._scored).content if self._scored else []
        self._scored.clear()
        self._texts.append(text)
        self._part.logprobs += logprobs
        if self._listener is not None and (text or logprobs):
            self._listener.text(len(self._items) - 1, item, text, logprobs)

    def _begin(self, item: OutputItem) -> None:
        self._close("completed")
        self._open, self._texts = True, []
        self._items.append(item)
        if self._listener is not None:
            self._listener.begun(len(self._items) - 1, item)
        if isinstance(item, MessageItem):
            self._part = OutputText("", logprobs=[])
            item.content = [self._part]

    def _close(self, status: ItemStatus) -> None:
        if self._open:
            item = self._items[-1]
            self._fill(item, status)
            if self._listener is not None:
                self._listener.done(len(self._items) - 1, item)
        self._open = False

    def _fill(self, item: OutputItem, status: ItemStatus) -> None:
        item.status = status
        if isinstance(item, CallItem):
            item.arguments = "".join(self._texts)
        else:
            self._part.text = "".join(self._texts)

    def _id(self, prefix: str) -> str:
        return call_id(self._rid, 0, len(self._items), prefix)


def whole(admitted: Admitted, choice: Choice) -> Output:
    """The output of a choice that is complete: what its events come to."""
    output = Output(admitted)
    texts = choice.texts if choice.logprobs else [choice.text]  # how a text is cut makes no difference but to these
    for index, text in enumerate(texts):
        output.add(text, choice.logprobs[index : index + 1])
    output.end(choice.finish)
    return output
