"""Settings of the documentation site: `make docs`.

The pages are those of the repository, in their places, so that links between them are the same as in the repository.
The table of contents is made here, because the pages do without it.
"""

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "site")]

from reference_tables import with_tables  # noqa: E402

import topotrain  # noqa: E402  - the checkout that this file is in, and no other
from topotrain.core.events import EVENTS  # noqa: E402

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "topotrain"
release = version = topotrain.__version__
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = ["*.md", "docs/*.md", "docs/site/api.rst", "benchmarks/RESULTS.md"]
exclude_patterns = [".*", "build", "workspace", "topotrain", "tests", "scripts"]  # not even looked into
root_doc = "docs/index"
html_theme = "furo"
html_title = f"topotrain {release}"
html_extra_path = ["extra"]  # index.html, which leads to docs/index.html
html_copy_source = False
html_show_sphinx = False

myst_heading_anchors = 4  # the same names of headings as in the repository's links
smartquotes_action = "D"  # dashes; quotation marks in docstrings are those of code
html_show_sourcelink = False
highlight_language = "none"  # a block without a language is a picture or a job file

default_role = "code"  # docstrings write `name`
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
maximum_signature_line_length = 88
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
add_module_names = False

CONTENTS: Mapping[str, Iterable[str]] = {
    "Begin": [
        "README",
        "docs/tutorial",
        "docs/concepts",
        "docs/topologies",
        "docs/modes",
        "docs/examples",
        "docs/teaching",
        "docs/coming-from",
    ],
    "Reference": ["docs/python", "docs/site/api", "docs/configuration", "docs/reference", "docs/trainer"],
    "Models and data": ["docs/splitting", "docs/embeddings", "docs/kvstore", "docs/gpu"],
    "Run": [
        *("docs/troubleshooting", "docs/hosts", "docs/launchers", "docs/rendezvous", "docs/fault-tolerance"),
        *("docs/replay", "docs/security"),
    ],
    "Speed": [
        *("docs/advice", "docs/performance", "docs/profiling", "docs/slow-links", "docs/islands", "benchmarks/RESULTS"),
    ],
    "Other interfaces": [
        *("docs/integrations", "docs/pserver", "docs/clusterspec", "docs/session", "docs/data-parallel"),
        "docs/torch-store",
    ],
    "Inside": [
        *(
            "docs/architecture",
            "docs/trust",
            "docs/exactness",
            "docs/journey",
            "docs/journey-batch",
            "docs/journey-snapshot",
        ),
        "docs/differences",
    ],
    "Project": ["CONTRIBUTING", "SECURITY", "CHANGELOG"],
}
"""The pages by caption. A page that is not named here comes last."""

SEARCHED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "README": {"Install": ("install",)},
    "docs/tutorial": {
        "Watch it": ("dashboard",),
        "Kill a worker": ("worker killed", "kill"),
        "Stop, and go on": ("resume", "checkpoint"),
    },
    "docs/examples": {
        "A training in earnest": ("validation", "gradient accumulation", "accumulation"),
        "A GAN": ("several models",),
    },
    "docs/python": {
        "`tt.save`": ("save",),
        "Metrics, plateaus and early stopping": ("early stopping", "metrics", "plateau"),
        "`tt.clip_grad_norm_`": ("clip", "clip gradients"),
    },
    "docs/exactness": {"Mixed precision": ("mixed precision", "amp", "autocast"), "Data": ("data loader", "seed")},
    "docs/configuration": {"The learning rate: `LRGenProto`": ("learning rate", "schedule")},
    "docs/concepts": {"Staleness": ("staleness",)},
    "docs/troubleshooting": {
        "The loss does not fall": ("loss does not fall",),
        "It is slower than expected": ("slow", "slower than expected"),
        "It hangs": ("hang", "stuck"),
    },
    "docs/fault-tolerance": {"What restarts, and what is kept": ("restart",)},
    "docs/hosts": {"Two machines": ("two machines", "several machines")},
    "docs/slow-links": {
        "A slow network on one machine": ("slow network", "bandwidth"),
        "Compression": ("compression",),
    },
    "docs/splitting": {"Memory": ("out of memory",), "By the script": ("larger than memory",)},
    "docs/topologies": {"Downpour": ("downpour",)},
    "docs/watching": {
        "Curves in files and trackers": ("tensorboard", "wandb", "mlflow", "tracker"),
        "Logs and levels": ("logs",),
    },
    "docs/coming-from": {"DistributedDataParallel": ("ddp",)},
    "docs/security": {"The secret of a job": ("token", "secret")},
}
"""What readers search for, by the page and the heading that answer it. The search puts these entries first."""


def contents(pages: Iterable[str]) -> str:
    """Return the tables of contents of the first page: one for each caption, with the pages that exist."""
    there = {*pages} - {root_doc}
    named = {page for names in CONTENTS.values() for page in names}
    sections = {**CONTENTS, "More": sorted(there - named)}
    lines = []
    for caption, names in sections.items():
        if found := [f"/{name}" for name in names if name in there]:
            lines += ["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *found, "```"]
    return "\n".join(lines) + "\n"


def with_search_entries(page: str, text: str) -> str:
    """Return the page with the words of `SEARCHED` as entries of the index, each above its heading."""
    for heading, words in SEARCHED.get(page, {}).items():
        entries = "".join(f"```{{index}} ! {word}\n```\n" for word in words)
        heads = re.findall(rf"^#+ {re.escape(heading)}\n", text, re.MULTILINE)
        assert heads, f"{page} has no heading {heading!r}"
        text = text.replace(heads[0], f"{entries}\n{heads[0]}", 1)
    return text


def other_names(text: str) -> str:
    """Return entries for the public names that the API page does not name itself."""
    missing = [name for name in topotrain.__all__ if f":: topotrain.{name}\n" not in text and f"tt.{name}`" not in text]
    entries = (
        f".. auto{'class' if isinstance(getattr(topotrain, name), type) else 'function'}:: topotrain.{name}\n"
        for name in missing
    )
    return "\n".join(("", "Further names", "-------------", "", *entries)) if missing else ""


def event_entries() -> str:
    """Return entries for the events of a recording. Their fields and meanings are those of their classes."""
    title = "Events of a recording"
    entries = (f".. autoclass:: topotrain.core.events.{name}\n" for name in EVENTS)
    return "\n".join(("", title, "-" * len(title), "", *entries))


def complete(app: "Sphinx", page: str, source: list[str]) -> None:
    """Complete the pages that are made of others."""
    if page == root_doc:
        source[0] += contents(app.env.found_docs)
    elif page in {"docs/configuration", "docs/reference"}:
        source[0] = with_tables(source[0])
    elif page.endswith("/api"):
        source[0] += other_names(source[0]) + event_entries()
    source[0] = with_search_entries(page, source[0])


def with_code_blocks(app: "Sphinx", kind: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Mark indented paragraphs of a docstring as code: `::` is not written there."""
    for number in range(len(lines) - 1, 1, -1):
        before = lines[number - 2]
        begins = lines[number].startswith("    ") and not lines[number - 1].strip()
        if begins and before.strip() and not before.startswith(" ") and not re.match(r"[*-] |\w+:$|\.\. ", before):
            lines[number:number] = ["::", ""]


def with_lines(app: "Sphinx", kind: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Show each field in the docstring of an event on a line of its own."""
    if name.startswith("topotrain.core.events."):
        joined = re.sub(r"\n {2,}", " ", "\n".join(lines[1:]))
        lines[1:] = ["", *(f"| {line}" for line in joined.splitlines() if line), ""]


def without_check_functions(
    app: "Sphinx", kind: str, name: str, thing: object, options: object, signature: str | None, returned: str | None
) -> tuple[str, str | None] | None:
    """Leave the fields of job blocks to their page, where each has its meaning and what is accepted."""
    if name in {f"topotrain.{block}" for block in ("Job", "Cluster", "Updater")}:
        return "(**fields)", None
    return None


def setup(app: "Sphinx") -> dict[str, bool]:
    app.connect("source-read", complete)
    app.connect("autodoc-process-docstring", with_code_blocks, priority=400)  # before napoleon, which indents
    app.connect("autodoc-process-docstring", with_lines, priority=400)
    app.connect("autodoc-process-signature", without_check_functions)
    return {"parallel_read_safe": True}
