"""Random tokenizers for the fuzz: special tokens by role, added tokens, and chat templates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.helpers.tiny_run import WORDS

START, UNKNOWN, MASK, PADDING, SEPARATOR, END = "[CLS]", "[UNK]", "[MASK]", "[PAD]", "[SEP]", "</s>"
SPECIAL = (PADDING, UNKNOWN, START, SEPARATOR, MASK, END)
ROLES = ("system", "user", "assistant", "[INST]", "[/INST]")
TURN_START, TURN_END = "<|start|>", "<|end|>"

_OPEN, _CLOSE = "{% for message in messages %}", "{% endfor %}"
_ASK = "{% if add_generation_prompt %}" + TURN_START + "assistant {% endif %}"
_HEAD = TURN_START + "{{ message['role'] }} "
_SAID = "{{ message['content'] }}"
_IS_ANSWER = "{% if message['role'] == 'assistant' %}"
_MARK, _UNMARK = "{% generation %}", "{% endgeneration %}"
CHATS = {
    "marked with its end": _OPEN + _HEAD + _IS_ANSWER + _MARK + _SAID + TURN_END + _UNMARK
    + "{% else %}" + _SAID + TURN_END + "{% endif %}" + _CLOSE + _ASK,
    "marked without its end": _OPEN + _HEAD + _IS_ANSWER + _MARK + _SAID + _UNMARK + TURN_END
    + "{% else %}" + _SAID + TURN_END + "{% endif %}" + _CLOSE + _ASK,
    "unmarked": _OPEN + _HEAD + _SAID + TURN_END + _CLOSE + _ASK,
    "instructions": "{{ bos_token }}" + _OPEN + _IS_ANSWER + " " + _SAID + " {{ eos_token }}"
    + "{% else %} [INST] " + _SAID + " [/INST]{% endif %}" + _CLOSE,
    # as reasoning models do, it shortens earlier answers, so only `each` and `last` can train it
    "shortened": _OPEN + _HEAD + _IS_ANSWER.replace("%}", "and not loop.last %}")
    + "{{ message['content'].split(' ')[0] }}{% else %}" + _SAID + "{% endif %}" + TURN_END + _CLOSE + _ASK,
}  # fmt: skip
SHORTENED = "shortened"


@dataclass(frozen=True)
class Tokens:
    """A tokenizer of words.

    Attributes:
        around: the special tokens around a text: those of an "encoder", a "decoder" or an "encoder-decoder"; "": none.
        end: the end token.
        separator: the separator; None: the tokenizer has neither a separator nor a token of the class.
        padding: the padding token; None: it has none.
        special_last: whether special tokens have the last ids instead of the first.
        num_added: the number of words that were added to the tokenizer, and occur in texts.
        chat: a name of `CHATS`; "": no chat template.
    """

    around: str
    end: str = SEPARATOR
    separator: str | None = SEPARATOR
    padding: str | None = PADDING
    special_last: bool = False
    num_added: int = 0
    chat: str = ""

    @property
    def added(self) -> list[str]:
        return [f"<new{index}>" for index in range(self.num_added)]

    @property
    def words(self) -> list[str]:
        """The words of texts. Those that were added are more frequent than others."""
        return WORDS + self.added * 5

    @property
    def traits(self) -> list[str]:
        """The names of the groups of the report in which it counts."""
        return (
            [f"end token {self.end}"] * (self.end != SEPARATOR)
            + ["no separator"] * (self.separator is None)
            + ["no padding token"] * (self.padding is None)
            + ["padding is the end token"] * (self.padding == self.end)
            + ["special tokens last"] * self.special_last
            + ["added tokens"] * bool(self.num_added)
            + [f"chat {self.chat}"] * bool(self.chat)
        )

    def id_of(self, token: str) -> int:
        """Return the id of a special token."""
        return SPECIAL.index(token) + (len(ROLES) + len(WORDS) if self.special_last else 0)

    def write(self, folder: Path) -> None:
        """Write it into a folder."""
        from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        words = [*ROLES, *WORDS]
        names = [*words, *SPECIAL] if self.special_last else [*SPECIAL, *words]
        backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(names)}, unk_token=UNKNOWN))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        start = (START, self.id_of(START))
        if self.around == "encoder-decoder":
            special = [(self.end, self.id_of(self.end))]
            backend.post_processor = processors.TemplateProcessing(single=f"$A {self.end}", special_tokens=special)
        elif self.around == "decoder":
            single, pair = f"{START} $A", f"{START} $A $B"
            backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=[start])
        elif self.around == "encoder":
            separator = self.separator or self.end
            backend.post_processor = processors.BertProcessing((separator, self.id_of(separator)), start)
        roles = {"bos_token": START, "eos_token": self.end, "unk_token": UNKNOWN, "mask_token": MASK}
        if self.separator is not None:
            roles |= {"sep_token": self.separator, "cls_token": START}
        if self.padding is not None:
            roles["pad_token"] = self.padding
        names_of_inputs = ["input_ids", "attention_mask"]
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=names_of_inputs, **roles)
        tokenizer.add_tokens(self.added)
        if self.chat:
            tokenizer.add_tokens([AddedToken(token, special=True) for token in (TURN_START, TURN_END)])
            tokenizer.chat_template = CHATS[self.chat]
        tokenizer.save_pretrained(folder)


def draw_tokens(random: Random, kind: str, has_special: bool, chat: str, first_ids: bool) -> Tokens:
    """Draw a tokenizer.

    Args:
        random: the source of the draw.
        kind: "encoder", "decoder" or "encoder-decoder".
        has_special: whether it puts special tokens around a text.
        chat: its chat template, a name of `CHATS`; "": none.
        first_ids: whether special tokens must have the first ids, as models need that count positions from them.
    """
    end = random.choice((SEPARATOR, SEPARATOR, END))
    # encoder-decoders find their last state by the end token, so padding is another one
    padding: str | None = PADDING
    if kind != "encoder-decoder" and random.random() < 0.3:
        padding = random.choice((end, None))
    return Tokens(
        around=kind if has_special else "",
        end=end,
        separator=None if kind == "decoder" and random.random() < 0.5 else SEPARATOR,
        padding=padding,
        special_last=not first_ids and random.random() < 0.3,
        num_added=random.choice((0, 0, 3)),
        chat=chat,
    )


def draw_chat(words: list[str], random: Random) -> list[dict[str, str]]:
    """Return the messages of a chat of one or two questions with answers."""
    roles = ["system"] * (random.random() < 0.2) + ["user", "assistant"] * random.choice((1, 1, 2))
    return [{"role": role, "content": few_words(words, random)} for role in roles]


def few_words(words: list[str], random: Random) -> str:
    """Return a text of one to three words."""
    return " ".join(random.choices(words, k=random.choice((1, 2, 3))))
