"""``simpar app``: a page on this machine that simulates while one moves its sliders (needs the extra ``app``).

It answers on the loopback interface only, and loads nothing from a network.
"""

import logging
import os
import socket
import sys
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dash import ALL, Dash, Input, Output, State, ctx, dcc, html, no_update
from werkzeug.serving import make_server

from simpar.errors import JobError
from simpar.hardware.device import device_names
from simpar.model.presets import preset_names
from simpar.result import Result
from simpar.schedule.registry import SCHEDULES
from simpar.view.page import CONFIG
from simpar.view.palette import palette
from simpar.view.timeline import Timeline
from simpar.view.timeline_page import asset, page
from simpar.view.views import VIEWS
from simpar.view.what_if import DEFAULTS, NUMBERS, Outcome, from_query, outcome, own_nic_gbps, to_query, to_yaml

HOST = "127.0.0.1"

_SLIDERS = {  # ends as powers of two, and the unit of the first
    "tp": (0, 6, 1), "pp": (0, 6, 1), "cp": (0, 5, 1), "vpp": (0, 4, 1),
    "micro_batch": (0, 6, 1), "global_batch": (0, 13, 1), "seq_len": (0, 7, 1024), "nic_gbps": (0, 7, 25),
}  # fmt: skip
_LABELS = {
    "model": "model", "cluster": "cluster", "nic_gbps": "NIC, Gb/s",
    "tp": "tensor parallel", "pp": "pipeline parallel", "cp": "context parallel", "vpp": "model chunks a rank",
    "schedule": "schedule", "zero": "ZeRO", "sequence_parallel": "sequence parallel", "recompute": "recompute",
    "micro_batch": "micro-batch", "global_batch": "global batch", "seq_len": "tokens a sample",
}  # fmt: skip
_NAMES = tuple(DEFAULTS)
_BESIDE = 12  # characters of choices that have room beside their label

_PAGE = """<!DOCTYPE html>
<html lang="en"><head>{%metas%}<title>{%title%}</title>{%css%}<style>
body { LIGHT }
body:has(#dark input:checked) { DARK color-scheme: dark; }
STYLE</style></head>
<body>{%app_entry%}<footer>{%config%}{%scripts%}{%renderer%}</footer></body></html>"""


def build(first: Mapping[str, Any] | None = None) -> Dash:
    """The application.

    Args:
        first: what the fields hold at first; see :data:`simpar.view.what_if.DEFAULTS`.
    """
    app = Dash(
        __name__, serve_locally=True, title="simpar", update_title=None, assets_ignore=".*"
    )  # the files of other pages lie there
    app.index_string = _index()
    app.layout = _layout({**DEFAULTS, **(first or {})})
    _add_sync(app)
    _add_own_speed(app)
    _add_address(app)
    _add_simulation(app)
    _add_downloads(app)
    return app


def serve(
    first: Mapping[str, Any] | None = None,
    *,
    port: int = 8050,
    browser: bool = True,
    began: Callable[[str], None] = lambda _: None,
) -> None:
    """Answers on this machine alone until it is interrupted.

    Args:
        first: see :func:`build`.
        port: on the loopback interface.
        browser: opens the page in a browser, where this machine has a screen.
        began: is told the address once the port is taken.

    Raises:
        JobError: something else answers on that port.
    """
    try:
        place = socket.create_server((HOST, port))
    except OSError as error:
        raise JobError(
            f"port {port} of {HOST} cannot be taken ({error.strerror}); choose another with --port"
        ) from None
    # a line per request, and a warning not to deploy what only answers this machine
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server(HOST, port, build(first).server, threaded=True, fd=place.fileno())
    address = f"http://{HOST}:{place.getsockname()[1]}/"
    began(address)
    if browser and _has_screen():
        webbrowser.open(address)  # waits in the queue of the socket until it is served
    with place, server:
        server.serve_forever()


def _has_screen() -> bool:
    """Whether a browser can open a window: on a terminal alone, one of text would take that."""
    return sys.platform in ("darwin", "win32") or any(name in os.environ for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _index() -> str:
    names = ("surface", "text", "faint", "line", "alarm", "accent")
    text = _PAGE.replace("STYLE", asset("app.css"))
    for word, dark in (("LIGHT", False), ("DARK", True)):
        text = text.replace(word, " ".join(f"--{name}: {getattr(palette(dark), name)};" for name in names))
    return text


# ---- layout ---------------------------------------------------------------------------------------------------------


def _layout(first: Mapping[str, Any]) -> html.Div:
    side = [
        html.H1("simpar"),
        html.Datalist(id="models", children=[html.Option(value=name) for name in preset_names()]),
        html.Datalist(id="devices", children=[html.Option(value=f"{name}:16x8") for name in device_names()]),
        html.Div(id={"error": ""}, className="error"),
        *(_text(name, first[name], options) for name, options in (("model", "models"), ("cluster", "devices"))),
        _number("nic_gbps", first["nic_gbps"], own_nic_gbps(first["cluster"])),
        html.H2("degrees"),
        *(_number(name, first[name]) for name in ("tp", "pp", "cp", "vpp")),
        _choice("schedule", first["schedule"], list(SCHEDULES)),
        _choice("zero", first["zero"], [0, 1, 2, 3]),
        _choice("sequence_parallel", first["sequence_parallel"], [True, False]),
        html.H2("batch"),
        *(_number(name, first[name]) for name in ("micro_batch", "global_batch", "seq_len")),
        _choice("recompute", first["recompute"], ["none", "selective", "full"]),
    ]
    views = [name for name in VIEWS if name != "tornado"]
    main = [
        html.Div(
            id="top",
            children=[
                html.Div(id="figures"),
                html.Div(
                    id="buttons",
                    children=[
                        html.Button("keep as A", id="keep", title="compare what comes with this plan"),
                        html.Button("forget A", id="forget"),
                        html.Button("YAML", id="yaml", title="download the job file"),
                        html.Button("HTML", id="html", title="download the timeline as a page"),
                        html.Span(["link ", dcc.Clipboard(id="link", style={"display": "inline-block"})]),
                        dcc.Checklist([{"label": " dark", "value": "dark"}], [], id="dark"),
                    ],
                ),
            ],
        ),
        html.Div(
            id="bar",
            children=[
                dcc.RadioItems([*views, "A and B"], "timeline", id="view", inline=True, className="choice"),
                html.Span(id="kept-text"),
            ],
        ),
        html.Div(id="said", className="error"),
        html.Div(id="shown"),
    ]
    stores = [
        dcc.Location(id="url", refresh=False),
        dcc.Store(id="kept"),
        dcc.Store(id="loaded"),
        dcc.Download(id="download"),
    ]
    return html.Div(id="whole", children=[*stores, html.Div(side, id="side"), html.Div(main, id="main")])


def _field(name: str, *inside: Any, wide: bool = False) -> html.Div:
    label = html.Label([html.Span(_LABELS[name]), *inside[:1]])
    classes = "field wide" if wide else "field"
    return html.Div(
        [label, *inside[1:], html.Div(id={"error": name}, className="error")], className=classes, id=f"field-{name}"
    )


def _text(name: str, value: Any, options: str) -> html.Div:
    return _field(name, dcc.Input(id={"field": name}, value=value, type="text", list=options, debounce=True), wide=True)


def _number(name: str, value: Any, own: float | None = None) -> html.Div:
    """A number with a slider; where it is empty, both show what it is of its own."""
    low, high, unit = _SLIDERS[name]
    step = high // 4 + 1 if high > 8 else 1
    marks = {place: f"{unit * 2**place:,}" for place in range(low, high + 1, max(step, 1 + (high > 6)))}
    slider = dcc.Slider(
        low,
        high,
        1,
        value=_place(name, value or own),
        marks=marks,
        id=f"slider-{name}",
        included=False,
        allow_direct_input=False,
    )
    box = dcc.Input(id={"field": name}, value=value, type="number", placeholder=_own_text(own), debounce=True)
    return _field(name, box, slider)


def _own_text(own: float | None) -> str:
    return "" if own is None else f"{own:g}"


def _place(name: str, value: Any) -> int:
    low, high, unit = _SLIDERS[name]
    return min(high, max(low, (int(value) // unit).bit_length() - 1)) if value else low


def _choice(name: str, value: Any, options: Sequence[Any]) -> html.Div:
    shown = [{"label": {True: "yes", False: "no"}[o] if isinstance(o, bool) else str(o), "value": o} for o in options]
    if len(options) <= 4:
        radios = dcc.RadioItems(shown, value, id={"field": name}, inline=True, className="choice")
        return _field(name, radios, wide=sum(len(str(one["label"])) for one in shown) > _BESIDE)
    return _field(name, dcc.Dropdown(shown, value, id={"field": name}, clearable=False, style={"width": 150}))


# ---- callbacks ------------------------------------------------------------------------------------------------------


def _add_sync(app: Dash) -> None:
    """A slider sets the number beside it, and the number the slider, which shows what an empty one is of its own."""
    for name, (low, high, unit) in _SLIDERS.items():
        slider = f"slider-{name}"
        app.clientside_callback(
            f"""(place, typed, own) => {{
                const keep = window.dash_clientside.no_update, value = typed > 0 ? typed : +own;
                const at = value > 0 ? Math.min({high}, Math.max({low}, Math.floor(Math.log2(value / {unit})))) : {low};
                const by = window.dash_clientside.callback_context.triggered.map((it) => it.prop_id).join();
                if (at === place || !by) return [keep, keep];
                return by.includes("{slider}.") ? [{unit} * 2 ** place, keep] : [keep, at];
            }}""",
            Output({"field": name}, "value", allow_duplicate=True),
            Output(slider, "value"),
            Input(slider, "value"),
            Input({"field": name}, "value"),
            Input({"field": name}, "placeholder"),
            prevent_initial_call=True,
        )


def _add_own_speed(app: Dash) -> None:
    @app.callback(  # type: ignore[untyped-decorator]
        Output({"field": "nic_gbps"}, "placeholder"), Input({"field": "cluster"}, "value"), prevent_initial_call=True
    )
    def show_own(cluster: Any) -> str:
        return _own_text(own_nic_gbps(cluster))


def _add_address(app: Dash) -> None:
    """An address fills the fields once; from then on the fields write the address."""

    @app.callback(  # type: ignore[untyped-decorator]
        Output({"field": ALL}, "value"),
        Output("kept", "data"),
        Output("view", "value"),
        Output("loaded", "data"),
        Input("url", "search"),
        Input("keep", "n_clicks"),
        Input("forget", "n_clicks"),
        State({"field": ALL}, "value"),
        State({"field": ALL}, "id"),
        State("kept", "data"),
        State("view", "value"),
    )
    def fill(search: str, _keep: Any, _forget: Any, held: list[Any], ids: list[Any], kept: Any, view: str) -> Any:
        now = _values(held, ids)
        if ctx.triggered_id == "keep":
            return [no_update] * len(ids), now, no_update, True
        if ctx.triggered_id == "forget":
            return [no_update] * len(ids), None, "timeline" if view == "A and B" else no_update, True
        if not search:  # what the layout holds stays
            return [no_update] * len(ids), no_update, no_update, True
        values, given, wanted = from_query(search)
        if to_query(values, given) == to_query(now, kept):
            return [no_update] * len(ids), no_update, no_update, True
        return [values[i["field"]] for i in ids], given, wanted or view, True


def _add_simulation(app: Dash) -> None:
    @app.callback(  # type: ignore[untyped-decorator]
        Output("figures", "children"),
        Output("shown", "children"),
        Output("said", "children"),
        Output("kept-text", "children"),
        Output({"error": ALL}, "children"),
        Output("url", "search"),
        Output("link", "content"),
        Input({"field": ALL}, "value"),
        Input("kept", "data"),
        Input("view", "value"),
        Input("dark", "value"),
        State({"field": ALL}, "id"),
        State({"error": ALL}, "id"),
        State("url", "href"),
        State("loaded", "data"),
    )
    def show(  # noqa: PLR0917 - dash passes by position
        held: list[Any],
        kept: Any,
        view: str,
        dark: list[str],
        ids: list[Any],
        places: list[Any],
        href: str,
        loaded: Any,
    ) -> Any:
        values = _values(held, ids)
        now, before = outcome(values), outcome(kept) if kept else None
        query = to_query(values, kept, "" if view == "timeline" else view)
        link = (href or "").partition("?")[0] + query
        search = query if loaded else no_update  # not before the fields hold what the address says
        errors = [now.errors.get(place["error"], "") for place in places]
        said = _misfit(now.result)
        text = f"A: {before.result.title}" if before and before.result else ""
        if now.result is None:
            return no_update, no_update, said, text, errors, search, link
        drawn = _drawn(now.result, before, view, dark=bool(dark))
        return _figures(now.result, before), drawn, said, text, errors, search, link


def _values(held: Sequence[Any], ids: Sequence[Any]) -> dict[str, Any]:
    found = {i["field"]: value for i, value in zip(ids, held, strict=True)}
    return {name: _number_of(found[name]) if name in NUMBERS else found[name] for name in _NAMES}


def _number_of(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value == int(value) else value


def _misfit(result: Result | None) -> str:
    if result is None:
        return "there is a mistake; what is shown is the plan before it"
    if result.fits:
        return ""
    return f"does not fit: peak memory is {result.summary()['peak memory']}"


def _figures(result: Result, before: Outcome | None) -> list[html.Div]:
    old = before.result if before is not None else None
    tiles = []
    for name, value in result.headline.items():
        inside: list[Any] = [html.B(value), name]
        if old is not None:
            inside.append(html.I(f" (A: {old.headline.get(name, '')})"))
        tiles.append(html.Div(inside, className="figure"))
    if old is not None:
        change = result.step_time_s / old.step_time_s - 1
        words = html.B(f"{change:+.1%}".replace("-", "−"), className="worse" if change > 0 else "better")
        tiles.append(html.Div([words, "step against A"], className="figure"))
    return tiles


def _drawn(result: Result, before: Outcome | None, view: str, *, dark: bool) -> Any:
    if view == "A and B":
        if before is None or before.result is None:
            return html.Div("press “keep as A”, then change the plan", style={"padding": 24})
        return _frame(before.result.compare(result, words=("A", "B")), result.title, dark=dark)
    figure = result.view(view if view in VIEWS else "timeline", dark=dark)
    if isinstance(figure, Timeline):
        return _frame(figure, result.title, dark=dark)
    least, figure.layout.height = figure.layout.height, None  # it takes that of its place
    return dcc.Graph(figure=figure, config=CONFIG, responsive=True, style={"minHeight": least, "height": "100%"})


def _frame(figure: Any, title: str, *, dark: bool) -> html.Iframe:
    """The page of a timeline in a frame of its own, as dark as what is around it."""
    assert figure.contents is not None, "a timeline carries its contents"
    contents = replace(figure.contents, headline={}, dark=dark)  # the figures stand above already
    return html.Iframe(srcDoc=page(contents, title=title), title="timeline")


def _add_downloads(app: Dash) -> None:
    @app.callback(  # type: ignore[untyped-decorator]
        Output("download", "data"),
        Input("yaml", "n_clicks"),
        Input("html", "n_clicks"),
        State({"field": ALL}, "value"),
        State({"field": ALL}, "id"),
        State("dark", "value"),
        prevent_initial_call=True,
    )
    def download(_yaml: Any, _html: Any, held: list[Any], ids: list[Any], dark: list[str]) -> Any:
        values = _values(held, ids)
        if ctx.triggered_id == "yaml":
            return {"content": to_yaml(values), "filename": "job.yaml"}
        result = outcome(values).result
        if result is None:
            return no_update
        text = page(result.timeline(dark=bool(dark)).contents, title=result.title)
        return {"content": text, "filename": "timeline.html"}
