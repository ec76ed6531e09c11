"""The search of the built site, with the scores of Sphinx's `searchtools.js`, for queries without excluded words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sphinx.search.en import SearchEnglish

TITLE, PART_OF_TITLE, WORD, PART_OF_WORD, INDEX_ENTRY, OBJECT, PART_OF_OBJECT = 15, 7, 5, 2, 100, 11, 6
PRIORITIES = {0: 15, 1: 5, 2: -5}


def read_index(site: Path) -> dict[str, Any]:
    script = (site / "searchindex.js").read_text(encoding="utf-8")
    index: dict[str, Any] = json.loads(script.removeprefix("Search.setIndex(").rstrip(";\n").removesuffix(")"))
    return index


def found(index: dict[str, Any], query: str) -> list[str]:
    """Return the pages that a query finds, each once, the first result first."""
    results = [*_wholes(index, query.lower()), *_objects(index, query.lower()), *_words(index, query)]
    results.sort(key=lambda result: (-result[0], result[1].lower()))
    return list(dict.fromkeys(index["docnames"][file] for _, _, file in results))


def _wholes(index: dict[str, Any], query: str) -> Iterator[tuple[float, str, int]]:
    """Yield results for titles and main index entries that contain the query and are at most twice as long."""
    for title, places in index["alltitles"].items():
        if query in title.lower() and len(query) >= len(title) / 2:
            for file, _ in places:
                page = index["titles"][file]
                is_page = page == title
                yield (
                    round(TITLE * len(query) / len(title)) + is_page,
                    title if is_page else f"{page} > {title}",
                    file,
                )
    for entry, places in index["indexentries"].items():
        if query in entry and len(query) >= len(entry) / 2:
            for file, _, is_main in places:
                if is_main:
                    yield round(INDEX_ENTRY * len(query) / len(entry)), index["titles"][file], file


def _objects(index: dict[str, Any], query: str) -> Iterator[tuple[float, str, int]]:
    words = set(re.findall(r"\w+", query))
    for prefix, objects in index["objects"].items():
        for file, kind, priority, _, name in objects:
            full = f"{prefix}.{name}".lstrip(".")
            last = full.lower().rpartition(".")[2]
            about = f"{prefix} {name} {index['objnames'][str(kind)][2]} {index['titles'][file]}".lower()
            for word in words:
                if word in full.lower() and all(other in about for other in words - {word}):
                    score = OBJECT if word in (full.lower(), last) else PART_OF_OBJECT if word in last else 0
                    yield score + PRIORITIES.get(priority, 0), full, file


def _words(index: dict[str, Any], query: str) -> Iterator[tuple[float, str, int]]:
    """Yield results for pages that contain all words of the query, stemmed."""
    language = SearchEnglish({})
    given = {word for word in re.findall(r"\w+", query.lower()) if word not in language.stopwords}
    stems = {language.stem(word) for word in given if not word.isdigit()}
    scores: dict[int, dict[str, int]] = {}
    for stem in stems:
        for table, whole, part in (("terms", WORD, PART_OF_WORD), ("titleterms", TITLE, PART_OF_TITLE)):
            matches = {stem: whole} if stem in index[table] else {}
            if not matches and len(stem) > 2:
                matches = {term: part for term in index[table] if stem in term}
            for term, score in matches.items():
                files = index[table][term]
                for file in [files] if isinstance(files, int) else files:
                    scores.setdefault(file, {})[stem] = max(score, scores.get(file, {}).get(stem, 0))
    for file, by_stem in scores.items():
        if len(by_stem) in (len(stems), len([stem for stem in stems if len(stem) > 2])):
            yield max(by_stem.values()), index["titles"][file], file
