"""Cleans text for word classifiers: removes markup, contractions, accents and punctuation, and
splits it into words and n-grams.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator

CLEANUP_REGEX = re.compile(
    r"<.*?>|&([a-z0-9]+|#[0-9]{1,6}|#x[0-9a-f]{1,6});"
)  # a tag, or an entity

_WHOLE = {
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
_BEFORE_IS = (  # behind any other word, 's says whose
    "he|she|it|that|there|here|what|when|where|who|why|how"
)
_CONTRACTION = re.compile(
    rf"(?<!\w)(?:{'|'.join(map(re.escape, _WHOLE))})(?!\w)|(?<=\w)(?:{'|'.join(_ENDINGS)})(?!\w)|(?<!\w)(?:{_BEFORE_IS})'s(?!\w)",
    re.IGNORECASE,
)
_TOKEN = re.compile(r"[^\s.,()!?'\"]+|[.,()!?']")


def remove_html_tags(text: str) -> str:
    return CLEANUP_REGEX.sub("", text)


def expand_contractions(text: str) -> str:
    """`it's` -> `it is`; every other apostrophe is dropped."""
    before = None
    text = text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    while before != text:  # he'd've has two
        before, text = text, _CONTRACTION.sub(_expanded, text)
    return text.replace("'", "")


def _expanded(match: re.Match[str]) -> str:
    found = match[0]
    word = found.lower()
    if word in _ENDINGS:
        return _ENDINGS[word]
    if word in _WHOLE:
        return (found[0].upper() if found[0].isupper() else _WHOLE[word][0]) + _WHOLE[word][1:]
    return found[:-2] + " is"


def remove_accents(text: str) -> str:
    """What ASCII has no letter for goes."""
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def remove_punctuation(text: str) -> str:
    return re.sub(r"[^\w\s]|_", "", text)


def tokenize(text: str) -> list[str]:
    """Split into words in lower case and the marks that end or part sentences; other marks go."""
    text = re.sub(r"<br />|[;:]", " ", text.lower().replace('"', ""))
    return _TOKEN.findall(text)


def ngrams_iterator(token_list: Iterable[str], ngrams: int) -> Iterator[str]:
    """The tokens, then all runs of two, of three, up to `ngrams`, each joined by blanks."""
    tokens = list(token_list)
    yield from tokens
    for length in range(2, ngrams + 1):
        for start in range(len(tokens) - length + 1):
            yield " ".join(tokens[start : start + length])
