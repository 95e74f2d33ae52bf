"""Hostile names and paths: one corpus for everything that takes names."""

from __future__ import annotations

NAMES_THAT_LEAD_ASTRAY = [
    *("", ".", "..", "...", "../x", "x/..", "a/../../x", "a/./x", "/etc/passwd", "/", "a//b", "a/"),
    *("..\\x", "a\\b", "C:\\x", "C:x", "\\\\host\\share", "a:b", "con:", "file:///etc/passwd"),
    *(
        "hdfs://other/x",
        "a\0b",
        "\0",
        "a\nb",
        "a\rb",
        "\x1b[2J",
        "a\x7f",
        "\u202egnp.exe",
        "\ufeffa",
    ),
    *("a\u200bb", "a\u2028b", "\ud800", "\ue000", "%2e%2e/x", "%2E%2e", "a%2fb", "a%5Cb", "a%00"),
    *("\u2025", "\uff0e\uff0e", "\u2026/x", "\ufe52\ufe52", "a\uff0fb", "a\uff3cb", "a\uff1ab"),
    *(". .", " ", "  ..", "x" * 256, "\u00e9" * 128, "a/" + "x" * 256, "/".join("x" * 4000)),
    *(
        "\u0000.tmp",
        "a\tb",
        "a\u00adb",
        "..;/x/\\",
        "..\u2215x/.",
        "..%c0%af\0",
        "nul\0.txt",
        "a/b/../c",
        "../../../../etc/shadow",
    ),
]
"""Of something below a directory: a file in a manifest, a listing, a run."""

PATHS_THAT_LEAD_ASTRAY = [
    *("", "a\0b", "hdfs://nn/a/../b", "hdfs://nn/..", "hdfs://nn/./a", "file:///../etc/passwd"),
    *("file://elsewhere/x", "hdfs://nn/a\u202eb", "hdfs://nn/a\nb", "hdfs://n\\n/a"),
    *("hdfs://nn:/x", "hdfs://nn:80a/x", "hdfs://nn:80:90/x", "hdfs://[::1/x", "s3://bucket:x/y"),
    *("s3://key:secret@bucket/x", "hdfs://nn/" + "x" * 8001, "/" + "x" * 8001),
]
"""Of a directory, as users and their programs give it."""
