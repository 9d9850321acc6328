"""The paths that a 404 suggests."""

from __future__ import annotations

import pytest

from tsx_runtime.api.likely_paths import LikelyPaths

PATHS = LikelyPaths(
    [
        "/predictions/{model}",
        "/predictions/{model}/{version}",
        "/v1/models/{model}:predict",
        "/v2/models/{model}/infer",
        "/ping",
    ],
    {"the management address, http://127.0.0.1:8081": ["/models", "/models/{model}", "/ui/"]},
)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/predict/digits", "Did you mean /predictions/digits?"),
        ("/Predictions/digits/1.0", "Did you mean /predictions/digits/1.0?"),
        ("//predictions/digits", "Did you mean /predictions/digits?"),
        ("/prediction/a b", "Did you mean /predictions/a%20b?"),
        ("/predictions", "Did you mean /predictions/MODEL?"),
        ("/v2/model/digits/infer", "Did you mean /v2/models/digits/infer?"),
        ("/v1/models/digits:predic", "Did you mean /v1/models/digits:predict?"),
        ("/pingg", "Did you mean /ping?"),
        ("/models", "It is on the management address, http://127.0.0.1:8081."),
        ("/models/digits", "It is on the management address, http://127.0.0.1:8081."),
        ("/ui", "It is on the management address, http://127.0.0.1:8081."),
        ("/digits", "GET / lists the paths of this address."),
        ("/predictions/" + "x" * 8000, "GET / lists the paths of this address."),
    ],
)
def test_a_404_suggests_the_likely_path(path: str, hint: str) -> None:
    error = PATHS.not_found(path)
    assert error.message == f"Requested resource is not found, please refer to API document. {hint}"
    assert (error.status, error.type) == (404, "ResourceNotFoundException")
