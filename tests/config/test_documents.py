"""Reading a ModelDeployment from a file: every mistake is an error that says where it is."""

from __future__ import annotations

import re
import string

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.config.builders import MODEL, build, code_factors, document, other_settings

from kerf_runtime.config import ModelDeploymentSpec, load_document, parse_document
from kerf_runtime.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "deployment.yaml"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return path

    return write


def fails(path):
    with pytest.raises(ConfigError) as raised:
        load_document(path)
    assert raised.value.where.startswith(str(path))
    return str(raised.value)


def with_spec(**parts):
    return document({"model": MODEL, **parts})


def test_a_minimal_document_gets_every_default(write):
    found = load_document(write(document()))
    assert found.name == "demo"
    assert found.served_name == "demo"
    assert found.spec == ModelDeploymentSpec.model_validate({"model": MODEL})


def test_the_example_of_the_repository_is_valid(request):
    found = load_document(request.config.rootpath / "examples" / "smollm2.yaml")
    assert found.served_name == "smollm2"


def test_the_served_name_replaces_the_name_in_the_api(write):
    data = document({"model": {**MODEL, "servedName": "my/model"}})
    assert load_document(write(data)).served_name == "my/model"


@pytest.mark.parametrize(
    ("parts", "path", "message"),
    [
        ({"replica": 2}, "replica", "unknown field"),
        ({"compilation": {"levle": 3}}, "compilation.levle", "unknown field"),
        ({"compilation": {"level": 4}}, "compilation.level", "got 4"),
        ({"compilation": {"level": True}}, "compilation.level", "a number from 0 to 3"),
        ({"compilation": {"level": "3"}}, "compilation.level", "a number from 0 to 3"),
        (
            {"compilation": {"backend": "eager", "inductorConfig": {"max_autotune": True}}},
            "compilation",
            "inductorConfig: backend eager has no options",
        ),
        ({"compilation": {"cudagraphMode": "SOME"}}, "compilation.cudagraphMode", "got 'SOME'"),
        ({"engine": {"kvCacheMemory": "lots"}}, "engine.kvCacheMemory", "got 'lots'"),
        ({"engine": {"maxNumSeqs": 0}}, "engine.maxNumSeqs", "got 0"),
        ({"replicas": "two"}, "replicas", "got 'two'"),
        (
            {"compilation": {"inductorConfig": {"a": float("inf")}}},
            "compilation.inductorConfig.a",
            "finite",
        ),
    ],
)
def test_a_wrong_field_is_named_with_its_path_and_value(write, parts, path, message):
    path_to_file = write(with_spec(**parts))
    text = fails(path_to_file)
    assert f"{path_to_file}: spec: " in text
    assert re.search(rf"\b{re.escape(path)}\S*: .*{re.escape(message)}", text)


def test_all_wrong_fields_are_named_at_once(write):
    text = fails(write(with_spec(replica=2, drainSeconds=-1, engine={"dtype": "int4"})))
    for field in ("replica", "drainSeconds", "engine.dtype"):
        assert field in text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "set exactly one of pvc, oci, huggingFace, s3"),
        ({"pvc": {"claimName": "a"}, "oci": {"reference": "b"}}, "set exactly one of pvc, oci"),
        ({"huggingFace": {"repo": "a"}, "s3": {"bucket": "bbb"}}, "set exactly one of pvc, oci"),
        (
            {"oci": {"reference": "b"}, "huggingFace": {"repo": "a"}, "s3": {"bucket": "bbb"}},
            "set exactly one of pvc, oci",
        ),
    ],
)
def test_a_model_has_exactly_one_source(write, source, message):
    assert f"model.source: {message}" in fails(write(document({"model": {"source": source}})))


def test_a_volume_for_downloads_needs_a_source_that_is_downloaded(write):
    model = {**MODEL, "volume": {"existingClaim": "weights"}}
    assert "model: volume keeps downloaded weights" in fails(write(document({"model": model})))


@pytest.mark.parametrize("endpoint", ["hub", "ftp://hub", "http://u:p@hub", "http://hub/?a=b"])
def test_an_endpoint_is_an_address_without_secrets(write, endpoint):
    source = {"huggingFace": {"repo": "a", "endpoint": endpoint}}
    text = fails(write(document({"model": {"source": source}})))
    assert "model.source.huggingFace.endpoint" in text


@pytest.mark.parametrize("repo", ["", "a/b/c", "../b", "a/..", "https://hub/a", "a b", "a/"])
def test_a_repository_is_a_name_and_not_an_address(write, repo):
    source = {"huggingFace": {"repo": repo}}
    assert "model.source.huggingFace.repo" in fails(write(document({"model": {"source": source}})))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bucket", "a"),
        ("bucket", "a/b"),
        ("prefix", "/a"),
        ("prefix", "a//b"),
        ("prefix", "../a"),
        ("endpoint", "minio:9000"),
        ("endpoint", "ftp://minio"),
        ("endpoint", "http://minio/path"),
        ("endpoint", "http://user:password@minio"),
        ("region", "eu west"),
    ],
)
def test_what_cannot_name_a_place_in_s3_is_refused(write, field, value):
    source = {"s3": {"bucket": "models", field: value}}
    text = fails(write(document({"model": {"source": source}})))
    assert f"model.source.s3.{field}" in text


@pytest.mark.parametrize("name", ["", " ", "mm", "aten::", "aten::mm::x", "aten.mm", "aten::mm."])
def test_a_splitting_op_that_is_no_name_of_an_operator_is_refused(write, name):
    parts = {"compilation": {"splittingOps": ["aten::mm", "aten::mm.out", name]}}
    text = fails(write(with_spec(**parts)))
    assert "compilation.splittingOps.2" in text
    assert "written namespace::name" in text


def test_replicas_and_autoscaling_exclude_each_other(write):
    text = fails(write(with_spec(replicas=1, autoscaling={"maxReplicas": 2})))
    assert "set at most one of replicas, autoscaling" in text


@pytest.mark.parametrize("path", ["../other", "/etc", "a//b", "a/../b", "a/", ".hidden"])
def test_a_model_path_cannot_leave_its_volume(write, path):
    source = {"pvc": {"claimName": "models", "path": path}}
    assert "model.source.pvc.path" in fails(write(document({"model": {"source": source}})))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "Deployment"}, "found 0"),
        ({"apiVersion": "v1"}, "found v1 and ModelDeployment"),
        ({"metadata": None}, "metadata.name is missing"),
        ({"metadata": "demo"}, "metadata.name is missing"),
        ({"metadata": {"name": 7}}, "metadata.name is missing"),
        ({"metadata": {"name": "Demo"}}, "'Demo' cannot name a Service"),
        ({"metadata": {"name": "x" * 53}}, "at most 52"),
        ({"spec": None}, "spec"),
        ({"spec": ["model"]}, "spec"),
    ],
)
def test_a_document_of_another_kind_or_shape_is_refused(write, change, message):
    assert message in fails(write(document(**change)))


@pytest.mark.parametrize(("content", "found"), [("- a\n- b\n", "list"), ("hello\n", "str")])
def test_a_file_that_is_no_mapping_is_refused(write, content, found):
    assert f"expected a mapping, found {found}" in fails(write(content))


def test_other_kinds_in_the_same_file_are_skipped(write):
    other = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "models"}}
    path = write(yaml.safe_dump_all([other, document(), None]))
    assert load_document(path).name == "demo"


def test_two_model_deployments_in_one_file_are_refused_with_what_was_found(write):
    text = fails(write(yaml.safe_dump_all([document(), document()])))
    assert "expected exactly one ModelDeployment, found 2" in text


def test_a_file_without_a_model_deployment_lists_the_kinds_it_has(write):
    text = fails(write({"kind": "Secret"}))
    assert "found 0" in text
    assert "Secret" in text


def test_an_empty_file_is_refused(write):
    assert "found 0" in fails(write(""))


def test_a_missing_file_a_folder_and_a_file_without_permission_are_refused(tmp_path):
    assert "No such file" in fails(tmp_path / "nothing.yaml")
    assert "directory" in fails(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\x00broken",
        "a: [1, 2",
        "a: b: c",
        "date: 2026-13-45",  # PyYAML raises a plain ValueError
        "!!python/object:os.system {}",
        "[" * 3000,
    ],
    ids=["bytes", "unclosed", "colons", "date", "tag", "deep"],
)
def test_a_file_that_is_not_yaml_is_refused(write, content):
    assert "not valid YAML" in fails(write(content))


@settings(max_examples=200)
@given(st.binary(max_size=60) | st.text(string.printable + "éß", max_size=60).map(str.encode))
def test_no_content_whatever_raises_anything_but_a_config_error(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any") / "file.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        load_document(path)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
_known = st.sampled_from(
    [field.alias or name for name, field in ModelDeploymentSpec.model_fields.items()]
)


@given(st.dictionaries(_known, _json, max_size=4))
def test_no_spec_whatever_raises_anything_but_a_config_error(parts):
    data = with_spec(**parts)
    try:
        found = parse_document(data, where="file")
    except ConfigError as error:
        assert error.where == "file: spec"  # noqa: PT017 - most documents are wrong, some are right
    else:
        assert found.name == "demo"


@given(code_factors, other_settings)
def test_a_spec_survives_being_written_and_read(code, other):
    spec = build(code, other)
    again = parse_document(document(spec.to_document()), where="file").spec
    assert again == spec


def test_documents_cannot_be_changed():
    found = parse_document(document(), where="file")
    with pytest.raises(ValueError, match="frozen"):
        found.spec.replicas = 3


def test_a_key_given_twice_is_an_error_that_names_it_and_its_line(write) -> None:
    text = "apiVersion: kerf.dev/v1alpha1\nkind: ModelDeployment\nspec:\n  replicas: 1\n  replicas: 2\n"
    message = fails(write(text))
    assert "'replicas' is given twice" in message
    assert "line 4" in message
