"""What Hadoop's configuration and hdfs-native's errors mean."""

from __future__ import annotations

import errno
import re

import pytest

from feeding.errors import NotAuthenticated, PathError
from feeding.filesystem.hdfs.errors import ErrorKind, kind_of, sentence, translate, user_in
from feeding.filesystem.hdfs.hadoop_conf import (
    namenode_of,
    read_configuration,
    umask_of,
    user_name,
)
from feeding.filesystem.location import parse
from feeding.filesystem.registry import filesystem_for

STACK = r"\n\tat org.apache.hadoop.hdfs.server.namenode.FSDirectory.check(FSDirectory.java:1974)"
DENIED = RuntimeError(
    'RPCError("org.apache.hadoop.security.AccessControlException", "Permission denied: user=alice, '
    rf'access=WRITE, inode=\"/t\":root:supergroup:drwxr-xr-x{STACK}")'
)

CANCELLED = RuntimeError(
    'FatalRPCError("org.apache.hadoop.security.token.SecretManager$InvalidToken", "Token for real '
    "user: , can't be found in cache\")"
)


def gssapi(routine: str, words: str) -> RuntimeError:
    codes = f'raw: "0x000d0000", calling_error: "none", routine_error: "{routine}"'
    more = 'supplementary_info: "0x0000"'
    return RuntimeError(f'GSSAPIError(GssMajorCodes {{ {codes}, {more} }}, 2529638944, "{words}")')


UNSPECIFIED = "Unspecified GSS failure.  Minor code may provide more information: "
NO_TICKET = gssapi(
    "GSS_S_NO_CRED",
    "No credentials were supplied, or the credentials were unavailable or inaccessible: "
    "No Kerberos credentials available (default cache: /tmp/krb5cc_0)",
)
OLD_TICKET = gssapi("GSS_S_FAILURE", f"{UNSPECIFIED}Ticket expired")
ENDED_SESSION = gssapi("GSS_S_CONTEXT_EXPIRED", "The referenced context has expired: Success")
"""A ticket that ended a second ago: the KDC still takes it, and gives one that has ended."""
NO_KDC = gssapi("GSS_S_FAILURE", f"{UNSPECIFIED}Cannot contact any KDC for realm 'TFOS.TEST'")


def rpc(java_class: str, words: str = "words") -> RuntimeError:
    return RuntimeError(f'RPCError("org.apache.hadoop.{java_class}", "{words}{STACK}")')


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("/t/none"), ErrorKind.MISSING),
        (
            FileNotFoundError("File does not exist: /x\n\tat org.apache.hadoop.X.y"),
            ErrorKind.MISSING,
        ),
        (FileNotFoundError("Path is not a file: /t\n\tat org.apache"), ErrorKind.IS_DIRECTORY),
        (FileExistsError("/t already exists as a directory\n\tat"), ErrorKind.IS_DIRECTORY),
        (FileExistsError("/t/f for client 127.0.0.1 already exists"), ErrorKind.EXISTS),
        (DENIED, ErrorKind.DENIED),
        (CANCELLED, ErrorKind.UNPROVED),
        (NO_TICKET, ErrorKind.UNPROVED),
        (OLD_TICKET, ErrorKind.UNPROVED),
        (ENDED_SESSION, ErrorKind.UNPROVED),
        (RuntimeError("NoSASLMechanism"), ErrorKind.UNPROVED),
        (NO_KDC, ErrorKind.AWAY),
        (rpc("fs.ParentNotDirectoryException"), ErrorKind.NOT_DIRECTORY),
        (rpc("fs.PathIsNotEmptyDirectoryException"), ErrorKind.NOT_EMPTY),
        (rpc("hdfs.protocol.DSQuotaExceededException"), ErrorKind.NO_SPACE),
        (
            rpc("hdfs.protocol.FSLimitException$PathComponentTooLongException"),
            ErrorKind.BAD_PATH,
        ),
        (rpc("fs.InvalidPathException"), ErrorKind.BAD_PATH),
        (RuntimeError('InvalidArgument("No NameNode hosts found")'), ErrorKind.BAD_PATH),
        (rpc("hdfs.server.namenode.SafeModeException"), ErrorKind.AWAY),
        (rpc("ipc.StandbyException"), ErrorKind.AWAY),
        (rpc("something.NewException"), ErrorKind.REFUSED),
        (
            RuntimeError(
                'RPCError("java.io.IOException", "File /x could only be written to 0 of the 1 '
                'minReplication nodes.")'
            ),
            ErrorKind.AWAY,
        ),
        (OSError("Connection refused (os error 111)"), ErrorKind.AWAY),
        (RuntimeError("Failed to complete file in time"), ErrorKind.AWAY),
        (OSError("failed to lookup address: Name or service not known"), ErrorKind.UNKNOWN_HOST),
    ],
    ids=lambda value: value.name if isinstance(value, ErrorKind) else "",
)
def test_kinds_of_errors(error, kind):
    assert kind_of(error) is kind


@pytest.mark.fault("F40")
def test_a_refusal_names_user_and_whole_path_and_holds_no_java():
    who = "user 'alice', NameNode hdfs://nn:8020 from the path"
    seen = translate(DENIED, action="write", path="hdfs://nn:8020/t/x", who=who)
    assert isinstance(seen, PermissionError)
    assert (seen.errno, seen.filename) == (errno.EACCES, "hdfs://nn:8020/t/x")
    assert "user 'alice'" in str(seen)
    assert "user=alice, access=WRITE" in str(seen)
    assert "FSDirectory" not in str(seen)
    assert "org.apache" not in str(seen)
    assert user_in(DENIED) == "alice"


@pytest.mark.fault("F62")
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NO_TICKET, "No Kerberos credentials available (default cache: /tmp/krb5cc_0)"),
        (OLD_TICKET, "Ticket expired"),
        (ENDED_SESSION, "The referenced context has expired"),
        (CANCELLED, "InvalidToken: Token for real user: , can't be found in cache"),
    ],
)
def test_who_cannot_prove_themselves_learns_why_and_what_to_do(error, words):
    seen = translate(
        error, action="read", path="hdfs://nn:8020/x", who="NameNode hdfs://nn", next_step="kinit"
    )
    assert isinstance(seen, NotAuthenticated)
    assert isinstance(seen, PermissionError)
    assert str(seen) == f"cannot read hdfs://nn:8020/x: {words} (NameNode hdfs://nn); kinit"


def test_a_path_that_the_namenode_does_not_take_is_an_error_of_the_path():
    refused = rpc("fs.InvalidPathException", "Invalid path name")
    seen = translate(refused, action="look at", path="hdfs://nn/x:y", who="user 'a'")
    assert isinstance(seen, PathError)
    assert str(seen) == "cannot look at hdfs://nn/x:y: InvalidPathException: Invalid path name"


def test_an_error_without_words_is_called_by_its_name():
    assert sentence(OSError()) == "OSError"


def test_other_refusals_keep_the_name_of_their_java_class():
    seen = translate(rpc("a.NewException"), action="look at", path="hdfs://n/x", who="user 'a'")
    assert "NewException: words" in str(seen)


@pytest.fixture
def conf_dir(tmp_path):
    (tmp_path / "core-site.xml").write_text(
        "<configuration><property><name>fs.defaultFS</name><value>hdfs://ns1/</value></property>"
        "</configuration>"
    )
    (tmp_path / "hdfs-site.xml").write_text(
        "<configuration><property><name>dfs.ha.namenodes.ns1</name><value>a,b</value></property>"
        "</configuration>"
    )
    return tmp_path


def test_the_path_says_which_namenode_or_the_configuration_does(conf_dir):
    environ = {"HADOOP_CONF_DIR": str(conf_dir)}
    assert namenode_of(parse("hdfs://nn:9000/x"), environ).url == "hdfs://nn:9000"
    assert namenode_of(parse("hdfs://nn/x"), environ).url == "hdfs://nn:8020"
    assert namenode_of(parse("hdfs://ns1/x"), environ).url == "hdfs://ns1"
    assert namenode_of(parse("viewfs://table/x"), environ).url == "viewfs://table"
    default = namenode_of(parse("hdfs:///x"), environ)
    assert default.url == "hdfs://ns1"
    assert default.origin == f"from fs.defaultFS in {conf_dir}"
    assert namenode_of(parse("hdfs://[::1]/x"), {}).url == "hdfs://[::1]:8020"


@pytest.mark.parametrize("environ", [{}, {"HADOOP_CONF_DIR": "/nowhere"}])
def test_a_path_without_a_namenode_says_what_to_write(environ):
    with pytest.raises(PathError, match=r"hdfs:///x names no NameNode.*write hdfs://host:port/"):
        namenode_of(parse("hdfs:///x"), environ)


@pytest.mark.parametrize("default", ["file:///", "viewfs://ns1/", "nn:8020", "hdfs:///", "hdfs"])
def test_a_default_file_system_that_is_no_namenode_is_named(tmp_path, default):
    (tmp_path / "core-site.xml").write_text(
        f"<configuration><property><name>fs.defaultFS</name><value>{default}</value></property>"
        "</configuration>"
    )
    said = f"names no NameNode, and fs.defaultFS is '{default}' in {tmp_path}; write hdfs://host"
    with pytest.raises(PathError, match=re.escape(said)):
        namenode_of(parse("hdfs:///x"), {"HADOOP_CONF_DIR": str(tmp_path)})


def test_a_property_without_a_name_or_a_value_sets_nothing(tmp_path):
    (tmp_path / "core-site.xml").write_text(
        "<configuration><property><name>a</name></property><property><value>b</value></property>"
        "<property><name> c </name><value> d </value></property>"
        "<property><name>e</name><value></value></property></configuration>"
    )
    assert read_configuration(tmp_path) == {"c": "d", "e": ""}


def test_the_configuration_says_whether_users_prove_themselves(conf_dir):
    environ = {"HADOOP_CONF_DIR": str(conf_dir)}
    assert not namenode_of(parse("hdfs://nn/x"), environ).is_kerberos
    (conf_dir / "core-site.xml").write_text(
        "<configuration><property><name>hadoop.security.authentication</name>"
        "<value>Kerberos</value></property></configuration>"
    )
    assert namenode_of(parse("hdfs://nn/x"), environ).is_kerberos


def write_umask(directory, value):
    (directory / "core-site.xml").write_text(
        "<configuration><property><name>fs.permissions.umask-mode</name>"
        f"<value>{value}</value></property></configuration>"
    )
    return {"HADOOP_CONF_DIR": str(directory)}


@pytest.mark.parametrize(
    ("value", "umask"),
    [
        ("027", 0o027),
        (" 0077 ", 0o077),
        ("u=rwx,g=rwx,o=", 0o007),  # Hadoop's own example
        ("a=rwx, o-rwx, g-w", 0o027),
        ("+rx,u+w", 0o022),
        ("a=rwx,go=r", 0o033),
    ],
)
def test_the_configuration_has_the_umask(tmp_path, value, umask):
    assert umask_of(write_umask(tmp_path, value)) == umask


def test_without_a_configuration_the_umask_is_hadoops(conf_dir):
    assert umask_of({}) == 0o022
    assert umask_of({"HADOOP_CONF_DIR": str(conf_dir)}) == 0o022


@pytest.mark.parametrize("value", ["u=rwz", "99", "o", "27"])
def test_a_umask_that_is_none_is_named(tmp_path, value):
    said = f"fs.permissions.umask-mode is {value!r} in {tmp_path}; write it as 027"
    with pytest.raises(PathError, match=re.escape(said)):
        umask_of(write_umask(tmp_path, value))


def test_a_umask_that_is_none_refuses_writes_only(tmp_path, monkeypatch):
    write_umask(tmp_path, "all")
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    fs = filesystem_for("hdfs://nn:1")
    for write in (fs.mkdirs, lambda path: fs.write(path, b"x")):
        with pytest.raises(PathError, match="umask-mode is 'all'"):
            write("hdfs://nn:1/x")


def test_hadoop_home_is_the_second_choice(conf_dir, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    (home / "etc").mkdir()
    (home / "etc" / "hadoop").symlink_to(conf_dir)
    assert namenode_of(parse("hdfs:///x"), {"HADOOP_HOME": str(home)}).url == "hdfs://ns1"


def test_a_broken_site_file_is_named(conf_dir):
    (conf_dir / "core-site.xml").write_text("<configuration>")
    with pytest.raises(PathError, match=r"core-site\.xml is not XML"):
        read_configuration(conf_dir)


def test_the_user_is_hadoops_or_the_systems():
    assert user_name({"HADOOP_USER_NAME": "alice", "SPARK_USER": "bob"}) == "alice"
    assert user_name({"SPARK_USER": "bob"}) == "bob"  # a container's own user may be another
    assert user_name({})
