"""Addresses in two stores: a folder of this machine, and S3 as moto plays it."""

import pytest

from tests.addons.stores import server


@pytest.fixture(scope="session")
def s3_server():
    with server.s3() as variables:
        yield variables


@pytest.fixture
def s3(s3_server, tmp_path, monkeypatch) -> str:
    """An address of S3."""
    server.with_environment(monkeypatch, s3_server)
    return f"{server.BUCKET}/{tmp_path.name}"


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.cluster)])  # S3 needs extra packages
def address(request, tmp_path) -> str:
    """An address in each of the two stores."""
    if request.param == "s3":
        return request.getfixturevalue("s3")
    return f"file://{tmp_path}/store"
