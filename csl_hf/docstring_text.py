"""From a docstring to clean sentences of prose.

Handles the usual layouts (reStructuredText, Google, NumPy, Epydoc, Markdown and plain text) with line rules
and regular expressions, in three steps: blank out what is not prose (code, doctests, tables, directives),
join the remaining lines to paragraphs, then unwrap inline markup, split into sentences and keep those that
read as English. It would rather lose a sentence than keep a piece of code.
"""

from __future__ import annotations

import inspect
import re

MIN_WORDS, MAX_WORDS = 4, 80
MIN_LETTER_SHARE = 0.6  # of the characters that are not white space


def prose_sentences(docstring: str) -> list[str]:
    """Return the sentences of a docstring's prose: white space normalised, typographic quotation marks and dashes
    replaced by those of ASCII, everything else as it stands.

    The first element is the docstring's summary (its first sentence), or "" if that is not prose; the others
    are the remaining sentences of 4 to 80 words, in order. A docstring that states a licence gives ``[""]``.
    """
    if _LICENSE.search(docstring):
        return [""]
    lines = inspect.cleandoc(docstring.translate(_TYPOGRAPHY)).splitlines()
    paragraphs = _paragraphs(_without_blocks(lines))
    sentences = [s for paragraph in paragraphs for s in split_sentences(_without_markup(paragraph))]
    has_summary = bool(sentences) and not _BEGINS_WITH_A_LIST.match(lines[0]) and is_prose(sentences[0])
    return [sentences[0] if has_summary else "", *filter(is_prose, sentences[has_summary:])]


_TYPOGRAPHY = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "..."})

# --- lines -------------------------------------------------------------------------------------------------

_LICENSE = re.compile(
    r"copyright \(c\)|copyright \d|licensed under|permission is hereby|all rights reserved"
    r"|redistribution and use|without warrant|license agreement",
    re.IGNORECASE,
)
_FENCE = re.compile(r"(```|~~~)(?!.*\1)")  # not where the fence also closes on the same line
_RULE = re.compile(r"""([=\-~^*#"'+.`_])\1{2,}$""")  # the line under a heading
_DIRECTIVE = re.compile(r"\.\.(?: +([\w:-]+)::)?(?: +|$)")
_ADMONITIONS = {"note", "warning", "important", "tip", "hint", "caution", "attention", "danger"}
_SKIPPED_SECTIONS = {"references", "reference", "see also", "bibliography", "todo", "methods"}
_TABLE_ROW = re.compile(r"\|.*\|$|\+[-=+]+\+$|[=\-]{2,}(?: +[=\-]{2,})+$|.*\w\S* {3,}\S")
_SECTION = re.compile(r"[A-Z][\w-]*(?: [\w-]+){0,2}:$")  # "Returns:", "Keyword Args:"
_BULLET = re.compile(r"(?:[-*+•]|\d{1,2}[.)]|\(?[a-z0-9]\))\s+")
_QUOTE = re.compile(r"^(\s*)> ?(?!>)(?:\[![A-Z]+\])?")  # Markdown: "> [!TIP]"
# Sections of a NumPy docstring in which every entry is a line "name : type" and an indented description.
_FIELD_SECTIONS = {
    "parameters",
    "other parameters",
    "returns",
    "yields",
    "receives",
    "raises",
    "warns",
    "attributes",
}
_FIELD = r"(?:param|arg|key|raise|return|var|ivar|cvar|attr|yield|exc)\w*\b"
# "x, y : int, optional" (NumPy), ":type x: int" and ":rtype: int" (Sphinx), "@type x: int" (Epydoc)
_TYPE_LINE = re.compile(rf"[*\w.`]+(?:, ?[*\w.`]+)* : |[:@](?!{_FIELD})\w+[^:`]*:(?:\s|$)")
_NAME = r"[`'\"*]*[\w.\[\]/-]+[`'\"*]*"
# ":param int x: ...", "x (int, optional): ...", "tuple[int, str]: ..."
_TYPED_PARAMETER = re.compile(rf"[:@]{_FIELD}[^:]*:(?:\s+|$)|{_NAME}\s*\(.*?\)\s*:(?:\s+|$)|\w[\w.]*\[[^:]*\]:\s+")
# "x: ...", "x -- ...", "`x` - ..."; in the middle of running text this is only a colon or a dash
_PARAMETER = re.compile(rf"{_NAME}(?:\s*:|\s+--?-?)(?:\s+|$)")
_BEGINS_WITH_A_LIST = re.compile(
    "|".join(p.pattern for p in (_SECTION, _BULLET, _TYPE_LINE, _TYPED_PARAMETER, _PARAMETER))
)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _without_blocks(lines: list[str]) -> list[str]:
    """Return as many lines, with code blocks, doctests, directives, skipped sections and types emptied."""
    kept: list[str] = []
    if any(line.lstrip().startswith("> [!") for line in lines):  # elsewhere ">" can be a relation
        lines = [_QUOTE.sub(r"\1", line) for line in lines]
    in_fence = in_doctest = in_skipped_section = False
    skipped_indent: int | None = None  # deeper lines than this belong to a block that is left out
    entry_indent: int | None = None  # indentation of the entries of a NumPy section
    for line, following in zip(lines, [*lines, ""][1:], strict=True):
        text, indent = line.strip(), _indent(line)
        name = text.lower().rstrip(":")
        if _RULE.match(following.strip()) and text:
            in_skipped_section = name in _SKIPPED_SECTIONS
            entry_indent = indent if name in _FIELD_SECTIONS else None
        elif indent == entry_indent and _indent(following) > indent:
            text = ""
        if text and skipped_indent is not None and indent <= skipped_indent:
            skipped_indent = None
        if _FENCE.match(text):
            in_fence = not in_fence
            text = ""
        in_doctest = bool(text) and (in_doctest or text.startswith(">>>"))
        if in_fence or in_doctest or in_skipped_section or skipped_indent is not None:
            text = ""
        directive = _DIRECTIVE.match(text)
        if directive and directive[1] in _ADMONITIONS:
            text = text[directive.end() :]
        elif directive or (text.endswith(":") and name in _SKIPPED_SECTIONS):
            text, skipped_indent = "", indent
        elif text.endswith("::"):
            skipped_indent = indent
        kept.append(" " * indent + text if text else "")
    return kept


def _paragraphs(lines: list[str]) -> list[str]:
    """Join wrapped lines: a paragraph ends at an empty line, a list item, a parameter or new indentation."""
    paragraphs: list[list[str]] = [[]]
    start = last = 0  # indentation of the paragraph's first and latest line
    is_item = False
    for line, following in zip(lines, [*lines, ""][1:], strict=True):
        text, indent = line.strip(), _indent(line)
        heading = _RULE.match(following.strip()) or _SECTION.match(text)
        if not text or heading or _RULE.match(text) or _TABLE_ROW.match(text) or _TYPE_LINE.match(text):
            paragraphs.append([])
            continue
        if indent < start or (indent > last and not is_item and not _is_unfinished(paragraphs[-1])):
            paragraphs.append([])
        bullet = _BULLET.match(text)
        text = text[bullet.end() :] if bullet else text
        parameter = _TYPED_PARAMETER.match(text)
        if not parameter and (bullet or not paragraphs[-1] or (is_item and indent <= start)):
            parameter = _PARAMETER.match(text)
        text = text[parameter.end() :] if parameter else text
        if bullet or parameter:
            paragraphs.append([])
        if not paragraphs[-1]:
            start, is_item = indent, bool(bullet or parameter)
        last = indent
        paragraphs[-1].append(text)
    return [" ".join(paragraph) for paragraph in paragraphs if paragraph]


def _is_unfinished(paragraph: list[str]) -> bool:
    """Whether a deeper line can continue this text, which then is no term with its definition below."""
    return bool(paragraph) and len(paragraph[-1].split()) >= 5 and paragraph[-1][-1] not in ".:!?"


# --- inline markup -----------------------------------------------------------------------------------------

_MARKUP = [
    (re.compile(r"\[`+~?([^`]+)`+\](?:\([^)]*\))?"), r"\1"),  # [`Name`], [`Name`](url)
    (re.compile(r"\[([^\]]+)\]\([^)\s]*\)"), r"\1"),  # [text](url)
    (re.compile(r":[\w:+.-]+:`([^`<]+?)\s*<[^`>]*>`"), r"\1"),  # :ref:`text <target>`
    (re.compile(r":[\w:+.-]+:`~(?:[^`]*\.)?([^`.]+)`"), r"\1"),  # :class:`~package.Name`
    (re.compile(r":[\w:+.-]+:`[!.]?([^`]+)`"), r"\1"),  # :class:`Name`, :class:`.Name`
    (re.compile(r"`([^`<]+?)\s*<[^`>]*>`_{1,2}"), r"\1"),  # `text <url>`__
    (re.compile(r"`~(?:[^`]*\.)?([^`.]+)`"), r"\1"),  # `~package.Name`
    (re.compile(r"(?<!`)`\.([A-Z][^`]*)`"), r"\1"),  # `.Name`
    (re.compile(r"`+([^`]+?)`+(?:__?\b)?"), r"\1"),  # ``code``, `code`, `target`_
    (
        re.compile(r"(?<![\w*])\*{1,3}([^\s*](?:[^*]*[^\s*])?)\*{1,3}(?![\w*])"),
        r"\1",
    ),  # **strong**, *emphasis*
    (re.compile(r"\s*\[(?:\d+|#\w*|[A-Z]\w*\d)\]_"), ""),  # [1]_, [CIT2002]_
    (re.compile(r"</?(?:b|i|u|p|a|em|tt|br|code|strong|sub|sup|Tip)\b[^>]*>"), ""),
    (re.compile(r"\\([*_`|'\"])"), r"\1"),
    (re.compile(r"::$"), ":"),
]
_MARKUP_SIGN = re.compile(r"[`*\[<\\:]")


def _without_markup(paragraph: str) -> str:
    if _MARKUP_SIGN.search(paragraph):  # most have none
        for pattern, replacement in _MARKUP:
            paragraph = pattern.sub(replacement, paragraph)
    return " ".join(paragraph.split())


# --- sentences ---------------------------------------------------------------------------------------------

_SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s+(?=[A-Z0-9\"'\[]|\([A-Z0-9])")
_ABBREVIATION = re.compile(
    r"\b(?:(?i:e\.g|i\.e|cf|vs|etc|resp|approx|no|fig|eq|sec|ch|vol|pp?|dr|mr|mrs|st|al|inc|ref)|[A-Z])\.\s+$"
)


def split_sentences(paragraph: str) -> list[str]:
    """Split after ``.``, ``!`` or ``?`` that an upper-case letter or a digit follows, but not after a common
    abbreviation or an initial. A sentence that begins with a lower-case word stays joined to the one before.
    """
    sentences, start = [], 0
    for end in _SENTENCE_END.finditer(paragraph):
        if not _ABBREVIATION.search(paragraph[start : end.end()]):
            sentences.append(paragraph[start : end.end()].strip())
            start = end.end()
    sentences.append(paragraph[start:].strip())
    return [sentence for sentence in sentences if sentence]


# Nearly every English sentence of some length has one of these; code, signatures and name lists have not.
_FUNCTION_WORD = re.compile(
    r"\b(?:a|all|an|and|any|are|as|at|be|been|by|can|each|for|from|has|have|if|in|into|is|it|its|may|must|no|not|of"
    r"|on|only|or|should|than|that|the|then|these|they|this|those|to|was|we|were|when|which|will|with|you|your)\b",
    re.IGNORECASE,
)
_CODE = re.compile(r"[{}\\|<>=$@~^`]|://|::|\w\(\)?\w*[,=]|\[\]|\.\.\s|--|#|_{3,}|\*\*|%\(|%s")
_NOTE_TO_SELF = re.compile(r"\b(?:TODO|FIXME|XXX|noqa)\b|licen[sc]e|copyright|warranty", re.IGNORECASE)
_FIRST, _LAST = re.compile(r"[\"'(]?[A-Za-z0-9]"), re.compile(r"[\w.!?:\"')]$")


def is_prose(sentence: str) -> bool:
    """Whether a sentence reads as English: length, share of letters, function words, no sign of code."""
    words = sentence.split()
    if not MIN_WORDS <= len(words) <= MAX_WORDS or not (_FIRST.match(sentence) and _LAST.search(sentence)):
        return False
    dense = sentence.replace(" ", "")
    if sum(map(str.isalpha, dense)) < MIN_LETTER_SHARE * len(dense) or not dense.isascii():
        return False
    if sentence.count("(") != sentence.count(")") or sentence.count('"') % 2:
        return False
    if _CODE.search(sentence) or _NOTE_TO_SELF.search(sentence):
        return False
    return len(_FUNCTION_WORD.findall(sentence)) >= (1 if len(words) < 10 else 2)
