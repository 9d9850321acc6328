"""The checks of predictions that the web page sends to `/ui/api/predict/MODEL[/VERSION]`.

Its explanations go to `/ui/api/explain/MODEL[/VERSION]` in the same way.
"""

from __future__ import annotations

from tsx_runtime.api.messages import Scope
from tsx_runtime.core.hidden_credentials import CREDENTIAL_HEADERS
from tsx_runtime.errors import ForeignOrigin, MethodNotAllowed

PREFIXES = {"/ui/api/predict/": "/predictions/", "/ui/api/explain/": "/explanations/"}
# A browser does not show responses to these methods as pages. `curl -T` sends PUT.
PREDICT_METHODS = ("POST", "PUT")
# credentials of the page, which are hidden from handlers
PAGE_CREDENTIALS = frozenset(map(str.encode, CREDENTIAL_HEADERS))


def is_page_prediction(scope: Scope) -> bool:
    return str(scope["path"]).startswith(tuple(PREFIXES))


def use_model_path(scope: Scope) -> None:
    """Replace the path of the page by that of the model's predictions or explanations.

    The scope is changed, not copied, because the access log reads the model from it.
    """
    path: str = scope["path"]
    prefix = next(filter(path.startswith, PREFIXES))
    scope["path"] = PREFIXES[prefix] + path.removeprefix(prefix)


def check_page(scope: Scope) -> None:
    """Check that a script has sent the request, so that no browser shows the response as a page.

    Raises:
        MethodNotAllowed: The method is not in `PREDICT_METHODS`.
        ForeignOrigin: The request comes from another site or from a navigation.
    """
    if scope["method"] not in PREDICT_METHODS:
        raise MethodNotAllowed(allowed=PREDICT_METHODS)
    headers = dict(scope["headers"])
    if (
        headers.get(b"sec-fetch-mode") == b"navigate"
        or headers.get(b"sec-fetch-site") == b"cross-site"
    ):
        raise ForeignOrigin(
            "Only the web page at /ui/ may call this address from a browser; send predictions to"
            " the inference address."
        )
