"""Certificates that a cluster's authority signs."""

from __future__ import annotations

import datetime

import pytest
from cryptography import x509

from tfos.control.authority import ClusterAuthority


@pytest.mark.fault("F53")
def test_certificates_hold_whatever_the_clock_of_a_host_says_and_however_long_a_stream_is():
    """A host without a battery begins at 1970 until it has heard the time."""
    authority = ClusterAuthority("test")
    keys = (authority.driver(), authority.node("worker:0"), authority.data_node("worker"))
    for pem in (authority.ca_pem, *(each.cert_pem for each in keys)):
        found = x509.load_pem_x509_certificate(pem)
        assert found.not_valid_before_utc == datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
        assert found.not_valid_after_utc.year == 9999
