"""Small models of scikit-learn, XGBoost and LightGBM, saved as their users save them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

pd = pytest.importorskip("pandas")
skops_io = pytest.importorskip("skops.io")
np = pytest.importorskip("numpy")
joblib = pytest.importorskip("joblib")

from sklearn.compose import make_column_transformer  # noqa: E402  # after the check for skops
from sklearn.datasets import load_iris  # noqa: E402
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier  # noqa: E402
from sklearn.impute import SimpleImputer  # noqa: E402
from sklearn.linear_model import LinearRegression, LogisticRegression  # noqa: E402
from sklearn.model_selection import GridSearchCV  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import OneHotEncoder, StandardScaler  # noqa: E402

CITIES = ["Bern", "Linz", "Ulm"]
SPECIES = ["setosa", "versicolor", "virginica"]


def people() -> Any:
    """Return a table with numbers, texts and truth values."""
    random = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "age": random.integers(18, 80, 60).astype(float),
            "city": random.choice(CITIES, 60),
            "zip": random.choice(["01", "02"], 60),
            "paid": random.choice([True, False], 60),
        }
    )


def target(table: Any) -> Any:
    return ((table.age > 50) ^ (table.city == "Ulm")).astype(int)


def iris() -> tuple[Any, Any]:
    table, species = load_iris(as_frame=True, return_X_y=True)
    return table.set_axis(["a", "b", "c", "d"], axis=1), species


def mixed() -> Any:
    steps = make_column_transformer(
        (make_pipeline(SimpleImputer(), StandardScaler()), ["age"]),
        (OneHotEncoder(), ["city"]),
        (OneHotEncoder(handle_unknown="ignore"), ["zip"]),
        ("passthrough", ["paid"]),
    )
    table = people()
    grid = GridSearchCV(make_pipeline(steps, LogisticRegression()), {}, cv=2)
    return grid.fit(table, target(table))


def by_dtype() -> Any:
    table = people().astype({"city": "category"}).drop(columns="zip")
    model = HistGradientBoostingClassifier(max_iter=2, categorical_features="from_dtype")
    return model.fit(table, target(table))


@pytest.fixture(scope="session")
def estimators() -> dict[str, Any]:
    table, species = iris()
    return {
        "forest": RandomForestClassifier(3, random_state=0).fit(table, np.array(SPECIES)[species]),
        "mixed": mixed(),
        "by_dtype": by_dtype(),
        "nameless": LinearRegression().fit(table.to_numpy(), species),
        "two": RandomForestClassifier(2, random_state=0).fit(table, np.c_[species, species > 1]),
        "scaler": StandardScaler().fit(table),
    }


@pytest.fixture(scope="session")
def saved(estimators: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files of scikit-learn's models into a directory."""
    directory = tmp_path_factory.mktemp("tables")
    for name, estimator in estimators.items():
        skops_io.dump(estimator, directory / f"{name}.skops")
    joblib.dump(estimators["forest"], directory / "forest.joblib", compress=3)
    return directory


@pytest.fixture(scope="session")
def boosters(saved: Path) -> dict[str, Any]:
    """Write models of XGBoost into the directory, and return them."""
    xgboost = pytest.importorskip("xgboost")
    table, species = iris()
    categories = people().astype({"city": "category", "zip": "category"})
    models = {
        "flowers.json": xgboost.XGBClassifier(n_estimators=2).fit(table, species),
        "number.ubj": xgboost.XGBRegressor(n_estimators=2).fit(table.to_numpy(), species),
        "categories.ubj": xgboost.XGBClassifier(n_estimators=2, enable_categorical=True).fit(
            categories, target(categories)
        ),
    }
    for name, model in models.items():
        model.save_model(saved / name)
    hinge = xgboost.DMatrix(table, label=species > 0)
    models["hinge.json"] = xgboost.train({"objective": "binary:hinge"}, hinge, 2)
    models["hinge.json"].save_model(saved / "hinge.json")
    return models


@pytest.fixture(scope="session")
def trees(saved: Path) -> dict[str, Any]:
    """Write models of LightGBM into the directory, and return them."""
    lightgbm = pytest.importorskip("lightgbm")
    table, species = iris()
    categories = people().astype({"city": "category", "zip": "category"})
    options = {"n_estimators": 2, "verbose": -1, "min_child_samples": 5}
    models = {
        "flowers.txt": lightgbm.LGBMClassifier(**options).fit(table, species),
        "two.txt": lightgbm.LGBMClassifier(**options).fit(categories, target(categories)),
        "number.txt": lightgbm.LGBMRegressor(**options).fit(table.to_numpy(), species),
    }
    for name, model in models.items():
        model.booster_.save_model(saved / name)
    return models


@pytest.fixture(autouse=True)
def without_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
