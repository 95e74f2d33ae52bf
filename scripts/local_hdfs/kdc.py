"""A Kerberos realm on this host: a key distribution centre (KDC), its principals and their keytabs.

Covers: the realm's database and files in one private directory, and the command of its process.
Does not: start or end that process (cluster), configure Hadoop for it (kerberos_sites).
Threads: one at a time.
"""

from __future__ import annotations

import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from scripts.local_hdfs.errors import MissingTool
from scripts.local_hdfs.short_program import run_to_end
from scripts.local_hdfs.sites import HOST

REALM = "TFOS.TEST"
_KRB5_CONF = """\
[libdefaults]
  default_realm = {realm}
  dns_lookup_kdc = false
  dns_lookup_realm = false
  dns_canonicalize_hostname = false
  rdns = false
  udp_preference_limit = 1
[realms]
  {realm} = {{
    kdc = {host}:{port}
  }}
"""
_KDC_CONF = """\
[kdcdefaults]
  kdc_listen = {host}:{port}
  kdc_tcp_listen = {host}:{port}
[realms]
  {realm} = {{
    database_name = {directory}/principals
    key_stash_file = {directory}/stash
    acl_file = {directory}/acl
    max_life = 10h
    max_renewable_life = 7d
  }}
[logging]
  kdc = STDERR
"""


@dataclass(frozen=True, slots=True)
class Kdc:
    """The realm whose files are in one directory."""

    directory: Path
    port: int

    @property
    def krb5_conf(self) -> Path:
        """What KRB5_CONFIG should be."""
        return self.directory / "krb5.conf"

    @property
    def command(self) -> list[str]:
        """The KDC in the foreground."""
        return [tool("krb5kdc"), "-n", "-r", REALM, "-P", str(self.directory / "pid")]

    def environ(self) -> dict[str, str]:
        """Return the variables by which MIT's programs find this realm and no other."""
        profile = str(self.directory / "kdc.conf")
        return {"KRB5_CONFIG": str(self.krb5_conf), "KRB5_KDC_PROFILE": profile}

    def keytab(self, principal: str) -> Path:
        """Return the file with a principal's keys."""
        return self.directory / f"{principal.replace('/', '-')}.keytab"

    def create(self, principals: list[str]) -> None:
        """Make the realm's files, its database and a keytab for each principal.

        Raises:
            MissingTool: Kerberos is not installed.
            LocalHdfsError: one of its programs failed.
        """
        self.directory.mkdir(mode=0o700)
        values = {"realm": REALM, "host": HOST, "port": self.port, "directory": self.directory}
        self.krb5_conf.write_text(_KRB5_CONF.format(**values))
        (self.directory / "kdc.conf").write_text(_KDC_CONF.format(**values))
        (self.directory / "acl").touch()
        self._run("kdb5_util", "create", "-s", "-r", REALM, "-P", secrets.token_hex(16))
        for principal in principals:
            keytab = str(self.keytab(principal))
            self._run("kadmin.local", "addprinc", "-randkey", principal)
            self._run("kadmin.local", "ktadd", "-norandkey", "-k", keytab, principal)

    def kinit(self, principal: str, cache: Path, *, life_s: int = 36_000) -> None:
        """Get a ticket by keytab, as a user does with `kinit -kt`.

        Args:
            principal: the user's principal.
            cache: the file for it; KRB5CCNAME names it to programs.
            life_s: seconds until it expires.
        """
        keytab = str(self.keytab(principal))
        self._run("kinit", "-c", str(cache), "-l", f"{life_s}s", "-kt", keytab, principal)

    def _run(self, program: str, *arguments: str) -> None:
        environ = {**os.environ, **self.environ()}
        run_to_end(f"{program} {arguments[0]}", [tool(program), *arguments], environ)


def tool(name: str) -> str:
    """Return the path of one of Kerberos' programs, which lie beside a user's PATH on Debian.

    Raises:
        MissingTool: the program is not installed.
    """
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None:
        raise MissingTool(
            f"Kerberos needs {name}; run: apt-get install krb5-kdc krb5-admin-server krb5-user"
        )
    return found
