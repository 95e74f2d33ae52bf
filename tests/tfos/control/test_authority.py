"""Certificates that a cluster's authority signs."""

from __future__ import annotations

import datetime

from cryptography import x509

from tfos.control.authority import ClusterAuthority

LONGEST_JOB = datetime.timedelta(days=9 * 365)
"""A Structured Streaming query has no end."""


def test_certificates_outlive_a_stream_that_is_trained_for_years():
    authority = ClusterAuthority("test")
    until = datetime.datetime.now(datetime.UTC) + LONGEST_JOB
    keys = (authority.driver(), authority.node("worker:0"), authority.data_node("worker"))
    for pem in (authority.ca_pem, *(each.cert_pem for each in keys)):
        assert x509.load_pem_x509_certificate(pem).not_valid_after_utc > until
