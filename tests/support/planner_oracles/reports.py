"""Read the pages that ``Plan.report`` writes, without a browser."""

import base64
import hashlib
import json
import re
import zlib
from html.parser import HTMLParser

VOID = {"meta", "input", "br", "link", "img"}


class Page(HTMLParser):
    """The elements of a page: every start tag with its attributes, the scripts, and each element's text by its id."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.scripts, self.texts, self.open = [], [], {}, []
        self.feed(text)
        self.close()
        assert not self.open, f"these elements are not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag not in VOID:
            self.open.append((tag, attributes.get("id")))
        if tag == "script":
            self.scripts.append((attributes, ""))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1][0] == tag, f"</{tag}> closes <{self.open[-1][0]}>"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1][0] == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = attributes, text + data
        for _, name in self.open:
            if name:
                self.texts[name] = self.texts.get(name, "") + data

    @property
    def model(self):
        """The model that the page shows."""
        return json.loads(zlib.decompress(base64.b64decode(self.texts["model"])))

    @property
    def policy(self):
        """The directives of the content security policy, by name."""
        (text,) = [a["content"] for tag, a in self.tags if a.get("http-equiv") == "Content-Security-Policy"]
        return {name: values for name, *values in (part.split() for part in text.split(";"))}

    @property
    def hashes(self):
        """The hash of each script that runs, in the form of a content security policy."""
        run = [text for attributes, text in self.scripts if "type" not in attributes]
        return [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in run]


def explained(text):
    """Return the parts of a text of ``Plan.explain``: the head, the facts by label, (share, tree) for each tree, and
    the columns of each other plan by its name."""
    head, *lines = text.splitlines()
    fact, tree = r"  (\w[\w ]{0,9}) (\S.*)", r" {1,8}(\d+(?:/\d+)?) (\w.*)"
    row = r"    (.+?) +(\S+ \w+) \((\S+) x\) +(\S+) GB/s when large, (\S+) % of the bound"
    facts, trees, others = (
        [match for line in lines if (match := re.fullmatch(kind, line))] for kind in (fact, tree, row)
    )
    facts = {match[1].strip(): match[2] for match in facts}
    return head, facts, [match.groups() for match in trees], {match[1]: match.groups()[1:] for match in others}
