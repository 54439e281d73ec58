"""A tier in an object store: a real S3 server, with and without trouble on the way."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from datastates.errors import ConfigError, StorageError
from datastates.manifest import CommitRecord, FileRecord
from datastates.tiers import bucket, multipart_leftovers, parts, redaction, store
from datastates.tiers.carrying import StoppedError
from tiers.checkpoints import SLAB
from tiers.object_server import BUCKET, KEY, SECRET, TOKEN, Server
from tiers.rig import Ranks, tier_of

URL = f"s3://{BUCKET}/run"
PART = 5 << 20
BIG = (2 * PART + SLAB + 11, 77)  # three parts, and a small file


@pytest.fixture(autouse=True)
def small_and_hasty(monkeypatch):
    """Parts as small as S3 allows, and pauses of milliseconds."""
    monkeypatch.setattr(parts, "MIN_PART_BYTES", PART)
    hasty = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=20), "base": 2}
    monkeypatch.setattr(bucket, "RETRIES", {**bucket.RETRIES, "backoff": hasty})


def same(server: Server, directory: Path, name: str, prefix: str = "run/") -> bool:
    """Whether all files of a checkpoint are there byte for byte, and its record."""
    record = (directory / ".datastates" / "commit.json").read_bytes()
    files = json.loads(record)["file_nbytes"]
    return server.get(f"{prefix}{name}/.datastates/commit.json") == record and all(
        server.get(f"{prefix}{name}/{file}") == (directory / file).read_bytes() for file in files
    )


def test_a_checkpoint_is_the_same_there_and_comes_in_order(tmp_path, commit, server):
    directory = commit(tmp_path / "a", "job/step1", BIG, world_size=2)
    ranks = Ranks(tmp_path / "a", URL, world_size=2)
    ranks.work()
    assert same(server, directory, "job/step1") and server.get("run/job/latest") == b"step1"
    written = [found.key for found in server.requests if found.method == "PUT" and not found.is_part]
    assert written[-2:] == ["run/job/step1/.datastates/commit.json", "run/job/latest"]
    first = min(index for index, key in enumerate(written) if "/rank-" in key)
    assert all(key.endswith(".json") or "rank1" in key for key in written[first:-1])
    assert sum(found.is_part for found in server.requests) == 2 * 3
    assert server.uploads() == 0
    server.requests.clear()
    Ranks(tmp_path / "a", URL).work()
    assert not [found for found in server.requests if found.method == "PUT"], "it is remembered"


def test_part_sizes_follow_the_size_of_the_object(tmp_path, commit, server, monkeypatch):
    monkeypatch.setattr(parts, "MAX_PARTS", 2)
    directory = commit(tmp_path / "a", "step1", BIG)
    Ranks(tmp_path / "a", URL).work()
    assert same(server, directory, "step1")
    sizes = [found.nbytes for found in server.requests if found.is_part]  # sent together, so they come in any order
    assert sorted(sizes) == [BIG[0] - (6 << 20), 6 << 20]


@pytest.mark.parametrize("trouble", [500, 503, 429, "reset", "reset after"])
def test_passing_trouble_is_waited_out(tmp_path, commit, server, trouble):
    seen: set[tuple[str, str, str]] = set()

    def first_time(request):
        what = (request.method, request.path, str(request.query))
        is_new = what not in seen and request.method in ("PUT", "GET", "HEAD") and "uploads" not in request.query
        seen.add(what)
        return trouble if is_new and (trouble != 429 or request.method == "PUT") else None

    directory = commit(tmp_path / "a", "step1", BIG)
    server.trouble = first_time
    ranks = Ranks(tmp_path / "a", URL)
    ranks.work()
    assert same(server, directory, "step1") and ranks.carried() == ["step1"]
    assert server.uploads() == 0


@pytest.mark.parametrize(
    ("at", "status", "shown"),
    [
        ("part", 503, "503"),
        ("part", 403, "403"),
        ("complete", 403, "403"),
        ("head", 500, "500"),
        ("create", 403, "403"),
    ],
)
def test_lasting_trouble_says_key_status_and_size_and_is_tried_again(tmp_path, commit, server, at, status, shown):
    def always(request):
        kind = {"part": request.is_part, "complete": request.method == "POST" and "uploadId" in request.query}
        kind |= {"head": request.method == "HEAD", "create": request.method == "POST" and "uploads" in request.query}
        return status if kind[at] else None

    directory = commit(tmp_path / "a", "step1", BIG)
    server.trouble = always
    ranks = Ranks(tmp_path / "a", URL)
    assert ranks.turn() > 0
    (error,) = ranks.errors()
    assert "run/step1/part0-rank0.pt" in error.replace(URL, "run") and shown in error
    if at != "head":
        assert f"cannot send {BIG[0]} bytes in parts of {PART}" in error
        assert server.uploads() == 0, "what failed is aborted"
    if at == "part":
        assert "partNumber=" in error
    assert ".datastates/commit.json" not in "".join(server.names())
    server.trouble = lambda _: None
    ranks.work()
    assert same(server, directory, "step1") and server.uploads() == 0


def test_a_dead_server_ends_a_try_soon_and_the_next_one_finishes(tmp_path, commit, server, monkeypatch):
    directory = commit(tmp_path / "a", "step1")
    ranks = Ranks(tmp_path / "a", URL)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert ranks.turn() > 0
    assert "connect" in ranks.errors()[-1].lower() or "sending request" in ranks.errors()[-1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    again = Ranks(tmp_path / "a", URL)
    again.work()
    assert same(server, directory, "step1")


def test_slow_parts_are_sent_several_at_a_time(tmp_path, commit, server):
    together = threading.Barrier(3, timeout=60)

    def meet(request):
        if request.is_part:
            together.wait()  # nobody goes on before all three are there
        return

    directory = commit(tmp_path / "a", "step1", BIG)
    server.trouble = meet
    Ranks(tmp_path / "a", URL).work()
    assert same(server, directory, "step1")


def test_a_length_that_is_wrong_after_completion_is_noticed(tmp_path, commit, server):
    commit(tmp_path / "a", "step1", BIG)

    def replace(request):
        if request.method == "HEAD" and "part0" in request.path:
            server.call("PUT", request.path, b"short")
        return

    server.trouble = replace
    ranks = Ranks(tmp_path / "a", URL)
    ranks.turn()
    assert f"5 bytes with ETag" in ranks.errors()[0] and f"expected {BIG[0]} bytes" in ranks.errors()[0]  # noqa: F541


def test_a_file_that_vanishes_before_the_commit_is_noticed_and_sent_again(tmp_path, commit, server):
    directory = commit(tmp_path / "a", "step1")

    def lose(request):
        if request.method == "PUT" and "/rank-" in request.path:
            server.call("DELETE", f"/{BUCKET}/run/step1/part1-rank0.pt")
            server.trouble = lambda _: None
        return

    server.trouble = lose
    ranks = Ranks(tmp_path / "a", URL)
    ranks.turn()
    assert "part1-rank0.pt is missing, expected 100 bytes; the checkpoint is not committed" in ranks.errors()[0]
    ranks.work()
    assert same(server, directory, "step1")


def test_files_that_are_there_are_not_sent_again(tmp_path, commit, server):
    directory = commit(tmp_path / "a", "step1", BIG)
    server.trouble = lambda request: 403 if "/rank-" in request.path and request.method == "PUT" else None
    Ranks(tmp_path / "a", URL).turn()
    server.trouble = lambda _: None
    server.requests.clear()
    Ranks(tmp_path / "a", URL).work()
    assert same(server, directory, "step1")
    assert not [
        found for found in server.requests if found.is_part or (found.key.endswith(".pt") and found.method == "PUT")
    ]


def test_an_object_of_another_save_is_no_file_of_this_one(tmp_path, commit, server):
    commit(tmp_path / "a", "step1", (100,))
    Ranks(tmp_path / "a", URL).work()
    directory = commit(tmp_path / "a", "step1", (100,), seed="again")
    ranks = Ranks(tmp_path / "a", URL)
    ranks.work()
    assert same(server, directory, "step1")
    assert len([key for key in server.names("run/step1") if "/rank-" in key]) == 1


def test_saving_again_never_pairs_old_record_and_new_files(tmp_path, commit, server):
    commit(tmp_path / "a", "step1", (100, 200), at=1.0)
    commit(tmp_path / "a", "step2", (100, 200), at=2.0)
    Ranks(tmp_path / "a", URL).work()
    directory = commit(tmp_path / "a", "step2", (100,), seed="again", at=3.0)
    server.trouble = lambda request: 403 if request.key.endswith(".pt") and request.method == "PUT" else None
    ranks = Ranks(tmp_path / "a", URL)
    ranks.turn()
    assert "run/step2/.datastates/commit.json" not in server.names() and server.get("run/latest") == b"step1"
    server.trouble = lambda _: None
    ranks.work()
    assert same(server, directory, "step2") and server.get("run/latest") == b"step2"
    assert "run/step2/part1-rank0.pt" not in server.names(), "what only the older one had is gone"


def test_a_corrupted_local_file_never_becomes_an_object(tmp_path, commit, server):
    directory = commit(tmp_path / "a", "step1", BIG)
    with open(directory / "part0-rank0.pt", "r+b") as file:
        file.seek(BIG[0] - 3)
        file.write(b"\0\0\0")
    ranks = Ranks(tmp_path / "a", URL)
    ranks.work()
    assert "CRC-32" in ranks.errors()[0] and ranks.carried() == []
    assert server.names() == [] and server.uploads() == 0


def test_stopping_in_the_middle_of_an_upload_leaves_no_parts(tmp_path, commit, server):
    commit(tmp_path / "a", "step1", BIG)
    ranks = Ranks(tmp_path / "a", URL)

    def stop(request):
        if request.method == "POST":
            ranks.carriers[0].stop()
        return

    server.trouble = stop
    with pytest.raises(StoppedError):
        ranks.carriers[0].turn()
    assert server.uploads() == 0 and ranks.carriers[0].is_idle and ranks.notes == []


def begin_upload(server: Server, key: str) -> None:
    server.call("POST", f"/{BUCKET}/{key}?uploads")


def test_uploads_that_crashes_have_left_are_aborted_of_this_prefix_only(tmp_path, commit, server):
    for key in ("run/step0/x.pt", "run/step1/part0-rank0.pt", "run/step1/other.pt", "running/x.pt", "else/x.pt"):
        begin_upload(server, key)
    directory = commit(tmp_path / "a", "step1")
    Ranks(tmp_path / "a", URL).work()
    assert same(server, directory, "step1") and server.uploads() == 2


def test_more_uploads_than_a_page_holds(server, monkeypatch):
    asked: list[dict[str, str]] = []
    aborted: list[str] = []

    def answer(_, method, path, query, **__):
        if method == "DELETE":
            aborted.append(f"{path}?{query['uploadId']}")
            return b""
        asked.append(query)
        number = len(asked)
        more = "true" if number < 3 else "false"
        entry = f"<Upload><Key>run/f &amp; {number}.pt</Key><UploadId>id{number}</UploadId></Upload>"
        marks = f"<NextKeyMarker>key{number}</NextKeyMarker><NextUploadIdMarker>mark{number}</NextUploadIdMarker>"
        head = '<ListMultipartUploadsResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        return f"{head}<IsTruncated>{more}</IsTruncated>{marks}{entry}</ListMultipartUploadsResult>".encode()

    monkeypatch.setattr(multipart_leftovers.MultipartUploads, "_request", answer)
    store.open_store(tier_of(URL), Ranks.fail).clean_forgotten([])
    assert [query.get("key-marker") for query in asked] == [None, "key1", "key2"]
    assert asked[2]["upload-id-marker"] == "mark2" and {query["prefix"] for query in asked} == {"run/"}
    assert aborted == [f"/run/f%20%26%20{number}.pt?id{number}" for number in (1, 2, 3)]


def test_the_signature_is_the_one_that_s3_expects(server, monkeypatch):
    """The test server does not look at signatures: the client of Amazon's own library does it here."""
    auth = pytest.importorskip("botocore.auth")
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    sent = []
    monkeypatch.setattr(multipart_leftovers.urllib.request, "urlopen", lambda request, timeout: sent.append(request))
    uploads = store.open_store(tier_of(URL), Ranks.fail)._bucket._uploads
    for call in (
        lambda: uploads.below("run/"),
        lambda: uploads.abort(multipart_leftovers.Upload("run/a b#ä.pt", "i/d+=")),
    ):
        with pytest.raises(TypeError):  # the answer is none
            call()
    for request in sent:
        base, _, query = request.full_url.partition("?")
        pairs = [pair.partition("=")[::2] for pair in query.split("&")]
        unsigned = [pair for pair in pairs if not pair[0].startswith("X-Amz-")]
        expected = AWSRequest(request.get_method(), base + "?" + "&".join("=".join(pair) for pair in unsigned))
        time = dict(pairs)["X-Amz-Date"]
        monkeypatch.setattr(auth, "get_current_datetime", lambda time=time: _datetime(time), raising=False)
        signer = auth.S3SigV4QueryAuth(Credentials(KEY, SECRET, TOKEN), "s3", "us-east-1", expires=300)
        signer.add_auth(expected)
        assert dict(pairs)["X-Amz-Signature"] == expected.url.rpartition("X-Amz-Signature=")[2].partition("&")[0]


def _datetime(text):
    from datetime import datetime, timezone

    return datetime.strptime(text, "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)


def test_where_uploads_may_not_be_listed_it_is_said_once_and_all_else_works(tmp_path, commit, server):
    server.trouble = lambda request: 403 if request.method == "GET" and "uploads" in request.query else None
    directory = commit(tmp_path / "a", "step1", BIG)
    commit(tmp_path / "a", "step2")
    ranks = Ranks(tmp_path / "a", URL)
    ranks.work()
    assert same(server, directory, "step1") and sorted(ranks.carried()) == ["step1", "step2"]
    (said,) = ranks.errors()
    assert "parts of interrupted uploads may stay" in said and "HTTP 403" in said and "Signature" not in said


def test_more_than_a_thousand_objects(tmp_path, commit, server):
    server.fill("run/step1/a/", 1005)
    directory = commit(tmp_path / "a", "step1")
    ranks = Ranks(tmp_path / "a", {"path": URL, "keep_last": 1})
    ranks.work()
    assert ranks.carried() == ["step1"] and same(server, directory, "step1")
    assert len(server.names("run/step1/")) == 1005 + 5
    assert [one.name for one in ranks.store.committed(None)] == ["step1"]
    commit(tmp_path / "a", "step2", (1,))
    ranks.work()
    assert server.names("run/step1/") == [] and [one.name for one in ranks.store.committed("")] == ["step2"]


def test_each_tier_has_its_own_retention(tmp_path, commit, server):
    server.call("PUT", f"/{BUCKET}/run/step99/theirs.bin", b"1")
    server.call("PUT", f"/{BUCKET}/run/notes.txt", b"1")
    for step in range(1, 6):
        commit(tmp_path / "a", f"step{step}", (10,))
        Ranks(tmp_path / "a", {"path": URL, "keep_last": 2, "keep_every": 3}).work()
    names = {key.split("/")[1] for key in server.names()}
    assert names == {"step3", "step4", "step5", "step99", "notes.txt", "latest"}
    assert server.get("run/latest") == b"step5"


@pytest.mark.parametrize("name", ["with space+and#hash%25.pt", "späß/ünï.pt", "~tilde&amp;=.pt"])
def test_names_are_kept_as_they_are(tmp_path, server, name):
    found = store.open_store(tier_of(URL), Ranks.fail)
    record = FileRecord(name, 5, SLAB, (0,))
    found.send("step1", "a-1", record, [memoryview(b"12345")])
    assert bytes(found.read_piece("step1", name, 1, 3)) == b"23"
    assert found.has("step1", "a-1", record, found.send("step1", "a-1", record, [memoryview(b"12345")]))


def test_a_missing_bucket_is_an_error_and_no_empty_tier(tmp_path, commit, server):
    commit(tmp_path / "a", "step1")
    ranks = Ranks(tmp_path / "a", "s3://nobucket/run")
    assert ranks.turn() > 0 and "NoSuchBucket" in ranks.errors()[-1]
    with pytest.raises(StorageError, match="NoSuchBucket"):
        ranks.store.latest("")


def test_what_is_no_record_is_no_checkpoint(server):
    server.call("PUT", f"/{BUCKET}/run/step1/.datastates/commit.json", b"{}")
    record = CommitRecord("a-1", "step2", 1, 1.0, (0,), {})
    server.call("PUT", f"/{BUCKET}/run/step2/.datastates/commit.json", record.to_bytes())
    found = store.open_store(tier_of(URL), Ranks.fail)
    assert [one.tag for one in found.committed(None)] == ["step2"]


def test_credentials_are_in_nothing_that_is_written_or_told(tmp_path, commit, server, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    commit(tmp_path / "a", "step1", BIG)
    ranks = Ranks(tmp_path / "a", URL)
    ranks.turn()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    server.trouble = lambda request: 403 if "uploads" in request.query or request.is_part else None
    other = Ranks(tmp_path / "a", URL)
    other.turn()
    server.trouble = lambda _: None
    other.work()
    told = "".join(note.error + note.tier + note.path for note in (*ranks.notes, *other.notes))
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    objects = b"".join(server.get(key) for key in server.names() if key.endswith(("json", "latest")))
    for secret in (KEY, SECRET, TOKEN):
        assert secret not in told and secret.encode() not in files + objects
    assert ranks.errors() and other.errors()


def test_texts_of_servers_are_cleaned(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_SAS_KEY", "sv=1&sig=hush")
    text = (
        "GET http://h/b?X-Amz-Credential=AKIA%2F1&X-Amz-Signature=abc123&x=1 failed: <Error>"
        "<AWSAccessKeyId>AKIAX</AWSAccessKeyId><StringToSign>AWS4\nsecret stuff</StringToSign></Error> sv=1&sig=hush"
        "\n\nDebug source:\n everything again"
    )
    found = redaction.redacted(text)
    assert not any(word in found for word in ("AKIA", "abc123", "stuff", "hush", "again", "\n"))
    assert "x=1" in found and "<Error>" in found and len(redaction.redacted("y" * 5000)) == 600


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(store.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"needs the package obstore: pip install 'datastates\[object-store\]'"):
        store.check_installed([tier_of(URL)])
    store.check_installed([tier_of("/b")])
