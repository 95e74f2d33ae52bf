"""HDFS errors: classification of hdfs-native's errors by Java class or text, and their translation.

hdfs-native raises OSError and RuntimeError with a text. For a NameNode's refusal the text holds the
Java class, and often the NameNode's stack trace, which users do not need.
Threads: any; pure.
"""

from __future__ import annotations

import enum
import errno
import re

from feeding.errors import NotAuthenticated, PathError


class ErrorKind(enum.Enum):
    """Kinds of errors, by what a caller can do."""

    MISSING = "missing"
    EXISTS = "exists"
    DENIED = "denied"
    UNPROVED = "unproved"
    """The user has no valid ticket or token."""
    NOT_EMPTY = "not empty"
    IS_DIRECTORY = "is a directory"
    NOT_DIRECTORY = "not a directory"
    NO_SPACE = "no space"
    BAD_PATH = "bad path"
    AWAY = "away"
    """A server is unavailable or not ready, or the connection broke: a retry may work."""
    UNKNOWN_HOST = "unknown host"
    REFUSED = "refused"
    """The NameNode refused for another reason."""


_BY_CLASS = {
    "AccessControlException": ErrorKind.DENIED,
    "AuthorizationException": ErrorKind.DENIED,
    "InvalidToken": ErrorKind.UNPROVED,
    "FileNotFoundException": ErrorKind.MISSING,
    "FileAlreadyExistsException": ErrorKind.EXISTS,
    "AlreadyBeingCreatedException": ErrorKind.AWAY,
    "PathIsNotEmptyDirectoryException": ErrorKind.NOT_EMPTY,
    "ParentNotDirectoryException": ErrorKind.NOT_DIRECTORY,
    "PathIsNotDirectoryException": ErrorKind.NOT_DIRECTORY,
    "NSQuotaExceededException": ErrorKind.NO_SPACE,
    "DSQuotaExceededException": ErrorKind.NO_SPACE,
    "QuotaByStorageTypeExceededException": ErrorKind.NO_SPACE,
    "InvalidPathException": ErrorKind.BAD_PATH,
    "PathComponentTooLongException": ErrorKind.BAD_PATH,
    "MaxDirectoryItemsExceededException": ErrorKind.NO_SPACE,
    "SafeModeException": ErrorKind.AWAY,
    "StandbyException": ErrorKind.AWAY,
    "RetriableException": ErrorKind.AWAY,
    "NotReplicatedYetException": ErrorKind.AWAY,
    "LeaseExpiredException": ErrorKind.AWAY,
    "RecoveryInProgressException": ErrorKind.AWAY,
    "ObserverRetryOnActiveException": ErrorKind.AWAY,
}
_BY_TYPE: tuple[tuple[type[BaseException], ErrorKind], ...] = (
    (FileNotFoundError, ErrorKind.MISSING),
    (FileExistsError, ErrorKind.EXISTS),
    (IsADirectoryError, ErrorKind.IS_DIRECTORY),
    (NotADirectoryError, ErrorKind.NOT_DIRECTORY),
    (PermissionError, ErrorKind.DENIED),
)
_BY_WORDS = (
    ("Path is not a file", ErrorKind.IS_DIRECTORY),
    ("already exists as a directory", ErrorKind.IS_DIRECTORY),
    ("must both be directories", ErrorKind.IS_DIRECTORY),
    ("Name or service not known", ErrorKind.UNKNOWN_HOST),
    ("could only be written to", ErrorKind.AWAY),
    ("could only be replicated to", ErrorKind.AWAY),
    ("InvalidArgument(", ErrorKind.BAD_PATH),
    ("InvalidPath(", ErrorKind.BAD_PATH),
    ("UrlParseError(", ErrorKind.BAD_PATH),
    ("UnsupportedFeature(", ErrorKind.REFUSED),
    ("Cannot contact any KDC", ErrorKind.AWAY),
    ("SASLError(", ErrorKind.UNPROVED),
    ("GSSAPIError(", ErrorKind.UNPROVED),
    ("NoSASLMechanism", ErrorKind.UNPROVED),
)
"""Texts that decide before hdfs-native's type, which is missing or wrong for them."""
_JAVA_CLASS = re.compile(r"\b(?:org|java|javax|com)(?:\.[a-z0-9_]+)+\.([A-Z]\w*(?:\$\w+)?)")
_CALL = re.compile(r'^\w+\("([\w.$]+)", "(.*)"\)$', re.DOTALL)
_GSSAPI = re.compile(r'^GSSAPIError\(.*, \d+, "(?:([^:"]*): )?(.*)"\)$')
"""The general words of its interface, and MIT's own behind them."""
_SAYS_NOTHING = ("", "Success")
"""MIT's own words where its interface has found the error, such as an ended session."""
_USER = re.compile(r"\buser=([^,\s]+)")
_ERRNO = {
    ErrorKind.MISSING: errno.ENOENT,
    ErrorKind.EXISTS: errno.EEXIST,
    ErrorKind.DENIED: errno.EACCES,
    ErrorKind.NOT_EMPTY: errno.ENOTEMPTY,
    ErrorKind.IS_DIRECTORY: errno.EISDIR,
    ErrorKind.NOT_DIRECTORY: errno.ENOTDIR,
    ErrorKind.NO_SPACE: errno.EDQUOT,
    ErrorKind.REFUSED: errno.EREMOTEIO,
}


def kind_of(error: BaseException) -> ErrorKind:
    """Return an error's kind: by known texts, else its type, else the Java class in its text."""
    text = str(error)
    for words, meaning in _BY_WORDS:
        if words in text:
            return meaning
    for kind, meaning in _BY_TYPE:
        if isinstance(error, kind):
            return meaning
    named = _JAVA_CLASS.search(text)
    if named is not None:
        return _BY_CLASS.get(named[1].rpartition("$")[2], ErrorKind.REFUSED)
    return ErrorKind.AWAY


def user_in(error: BaseException) -> str:
    """Return the user that the NameNode's refusal names, or an empty string."""
    found = _USER.search(str(error))
    return found[1] if found else ""


def sentence(error: BaseException) -> str:
    """Return an error's text as one line, without Java's class path and stack."""
    text = str(error).strip()
    ticket = _GSSAPI.match(text)
    if ticket is not None:
        general, own = ticket.groups()
        return general if general and own in _SAYS_NOTHING else own
    call = _CALL.match(text)
    if call is not None:
        name, words = re.split(r"[.$]", call[1])[-1], call[2]
        text = f"{name}: {words}" if name not in words else words
    text = re.split(r"\n\s*at |\\n\\tat |\n|\\n", text, maxsplit=1)[0]
    text = re.sub(r"\b(?:org|java|javax)(?:\.[a-z0-9_]+)+\.", "", text)
    return text[:500].strip() or type(error).__name__


def translate(
    error: BaseException, *, action: str, path: str, who: str, next_step: str = ""
) -> Exception:
    """Return the error to raise for an hdfs-native error.

    Args:
        error: as hdfs-native raised it; not of kind AWAY.
        action: a verb, for the sentence: "read", "list".
        path: with scheme and authority.
        who: the user and the origin of the NameNode's address, for the sentence.
        next_step: what to do where the user has no valid ticket or token.
    """
    kind = kind_of(error)
    if kind is ErrorKind.UNPROVED:
        return NotAuthenticated(f"cannot {action} {path}: {sentence(error)} ({who}); {next_step}")
    if kind is ErrorKind.BAD_PATH:
        return PathError(f"cannot {action} {path}: {sentence(error)}")
    number = _ERRNO[kind]
    words = {
        ErrorKind.MISSING: f"cannot {action}: no such file or directory ({who})",
        ErrorKind.EXISTS: f"cannot {action}: it exists ({who})",
    }.get(kind, f"cannot {action}: {sentence(error)} ({who})")
    return OSError(number, words, path)  # which picks its subclass by the number
