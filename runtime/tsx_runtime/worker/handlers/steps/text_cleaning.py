"""Steps that clean text for word classifiers, and split it into words and n-grams."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator

# A tag or an entity of HTML.
CLEANUP_REGEX = re.compile(r"<.*?>|&([a-z0-9]+|#[0-9]{1,6}|#x[0-9a-f]{1,6});")

_EXPANSIONS = {
    "ain't": "is not",
    "can't": "cannot",
    "'cause": "because",
    "how'd": "how did",
    "let's": "let us",
    "ma'am": "madam",
    "o'clock": "of the clock",
    "sha'n't": "shall not",
    "shan't": "shall not",
    "so's": "so as",
    "where'd": "where did",
    "won't": "will not",
    "y'all": "you all",
}
_ENDINGS = {
    "n't": " not",
    "'re": " are",
    "'ve": " have",
    "'ll": " will",
    "'d": " would",
    "'m": " am",
}
# After these words, 's stands for "is". After any other word, it is a possessive.
_SUBJECTS = "he|she|it|that|there|here|what|when|where|who|why|how"
_CONTRACTION = re.compile(
    rf"(?<!\w)(?:{'|'.join(map(re.escape, _EXPANSIONS))})(?!\w)"
    rf"|(?<=\w)(?:{'|'.join(_ENDINGS)})(?!\w)|(?<!\w)(?:{_SUBJECTS})'s(?!\w)",
    re.IGNORECASE,
)
_TOKEN = re.compile(r"[^\s.,()!?'\"]+|[.,()!?']")


def remove_html_tags(text: str) -> str:
    """Remove the tags and entities of HTML."""
    return CLEANUP_REGEX.sub("", text)


def expand_contractions(text: str) -> str:
    """Expand contractions, such as `it's` to `it is`, and drop all other apostrophes."""
    before = None
    text = text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    while before != text:  # "he'd've" has two.
        before, text = text, _CONTRACTION.sub(_expand, text)
    return text.replace("'", "")


def _expand(match: re.Match[str]) -> str:
    contraction = match[0]
    lowered = contraction.lower()
    if lowered in _ENDINGS:
        return _ENDINGS[lowered]
    if lowered in _EXPANSIONS:
        return (
            contraction[0].upper() if contraction[0].isupper() else _EXPANSIONS[lowered][0]
        ) + _EXPANSIONS[lowered][1:]
    return contraction[:-2] + " is"


def remove_accents(text: str) -> str:
    """Remove accents, and all letters that ASCII lacks."""
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def remove_punctuation(text: str) -> str:
    """Remove everything but letters, digits and whitespace."""
    return re.sub(r"[^\w\s]|_", "", text)


def tokenize(text: str) -> list[str]:
    """Split into lower-case words and the marks `.,()!?'`, and drop other marks."""
    text = re.sub(r"<br />|[;:]", " ", text.lower().replace('"', ""))
    return _TOKEN.findall(text)


def ngrams_iterator(token_list: Iterable[str], ngrams: int) -> Iterator[str]:
    """Yield the tokens, then all runs of 2 to `ngrams` tokens, joined by blanks."""
    tokens = list(token_list)
    yield from tokens
    for length in range(2, ngrams + 1):
        for start in range(len(tokens) - length + 1):
            yield " ".join(tokens[start : start + length])
