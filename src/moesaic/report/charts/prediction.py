"""Chart of predicted and measured phases."""

from __future__ import annotations

import numpy as np

from moesaic.report.charts.figure import SERIES, Figure, column, label, layout
from moesaic.report.prediction import Prediction
from moesaic.report.wording import listing, time_unit, timing


def phases(found: Prediction) -> Figure:
    """Chart the predicted and the measured time of each phase."""
    names = found.phases()
    both = (("predicted", found.predicted.phases_s), ("measured", found.measured.phases_s))
    scale, unit = time_unit(found.measured.step_s)
    data = [
        {
            "type": "bar", "name": name, "x": [label(phase) for phase in names],
            "y": column(np.array([seconds.get(phase, np.nan) / scale for phase in names])),
            "marker": {"color": colour},
            "hovertemplate": f"%{{x}}, {name}: %{{y:.3~g}} {unit}<extra></extra>",
        }
        for (name, seconds), colour in zip(both, (SERIES[1], SERIES[0]), strict=True)
    ]  # fmt: skip
    pairs = listing(
        [
            f"{phase} {timing(found.measured.phases_s.get(phase, np.nan))}, predicted "
            f"{timing(found.predicted.phases_s.get(phase, np.nan))}"
            for phase in names
        ],
        len(names),
    )
    return Figure(
        "predicted-phases",
        "Phases, predicted and measured",
        f"{unit} of a step on rank 0. Look for the pair that differs most.",
        f"Measured time of each phase, and the predicted one: {pairs}.",
        data,
        layout(
            barmode="group", hovermode="closest",
            xaxis={"type": "category", "title": {"text": ""}, "showgrid": False},
            yaxis={"rangemode": "tozero"},
        ),
        span=6,
        height=300,
    )  # fmt: skip
