// The charts: one figure of Plotly, whose rows share an axis of time or steps, the cursor, and what is zoomed.

import { byId, setText } from "./elements.js";
import { kindOf } from "./event_list.js";
import { lastBefore } from "./job_view.js";

/** The rows in their order. `ticks`: a value as text, in the language of d3-format. */
const CHARTS = [
  { title: "Loss", metrics: ["loss"] },
  { title: "Samples per second", metrics: ["samples_per_s"], fromZero: true },
  { title: "Staleness in versions", metrics: ["staleness_mean", "staleness_p95", "staleness_max", "staleness_bound"], fromZero: true },
  { title: "Share of time spent waiting", metrics: ["waiting_share"], fromZero: true, ticks: ".0%" },
  { title: "Bytes per second", metrics: ["bytes_per_s"], fromZero: true, ticks: ".3s" },
  { title: "Memory in bytes", metrics: ["memory_bytes"], fromZero: true, ticks: ".3s" },
  { title: "Updates per second of servers", metrics: ["updates_per_s"], fromZero: true },
];
const COLORS = 6;
const PALETTE = ["ink", "muted", "line", "surface", "bad", "good", "notable", ...Array.from({ length: COLORS }, (_, n) => `line-${n}`)];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
/** A row names so many lines; with more, lines of a color are one trace, and the pointer names the nearest. */
const NAMED = 12;
/** The points that are drawn in a row: more cost time and show nothing more. */
const POINTS = 6000;
/** The newest events have a line through all rows. */
const EVENT_LINES = 100;
/** Heights in pixels: of a row with its title, of the row of events, and beside them. */
const ROW = 200;
const TITLE = 30;
const EVENTS = 24;
const MARGIN = { l: 58, r: 14, t: 30, b: 30 };
/** The values themselves, behind a smooth line. */
const FAINT = { opacity: 0.25, hoverinfo: "skip", showlegend: false };

// Plotly understands some markup, which no name or text of a job may have.
function plain(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
}

/** The colors of the style sheet, as Plotly wants them. */
function palette() {
  const probe = byId("color-probe");
  return Object.fromEntries(PALETTE.map((name) => {
    probe.style.color = `var(--${name})`;
    return [name, getComputedStyle(probe).color];
  }));
}

/** The rows for these metrics: what scripts log, and evaluations, have names of their own. */
function rowsOf(metrics) {
  const known = new Set(CHARTS.flatMap((one) => one.metrics));
  const own = [...metrics].filter((name) => !known.has(name)).sort(compareNames).map((name) => (
    { title: name.replace(/^log:/, "").replace(":", ": "), metrics: [name] }));
  return [...CHARTS, ...own].filter((one) => one.metrics.some((name) => metrics.has(name)));
}

/** All charts of the page. onJump is called with a time, onLegend with the name of a run. */
export class Charts {
  constructor(onJump, onLegend) {
    this._plot = byId("chart-plot");
    this._moment = byId("chart-moment");
    [this._runs, this._t, this._restUntil] = [[], null, 0];
    byId("chart-missing").hidden = Boolean(window.Plotly);
    byId("chart-tools").hidden = !window.Plotly;
    byId("chart-none").hidden = !window.Plotly;
    [this._onJump, this._onLegend] = [onJump, onLegend];
    byId("chart-tools").addEventListener("input", () => this.redraw());
    new ResizeObserver(() => this.redraw()).observe(byId("charts"));
  }

  /** Show a job, with its events. Drawing what is new takes a tenth of the time at most. */
  show(view) {
    this._view = view;
    if (!view.running || performance.now() >= this._restUntil) this.redraw();
  }

  /** Show several runs, a line of each in every row; hidden: the names of those that are only in the legend. */
  compare(runs, hidden) {
    [this._runs, this._hidden] = [runs, hidden];
    this.redraw();
  }

  setMoment(t) {
    this._t = t;
    this._placeMoment();
  }

  /** Draw again, in the next frame. */
  redraw() {
    if (this._view && window.Plotly) this._frame ??= requestAnimationFrame(() => this._draw());
  }

  _draw() {
    this._frame = undefined;
    const began = performance.now();
    this._tools = Object.fromEntries(new FormData(byId("chart-tools")));
    setText(byId("smooth-value"), this._tools.smooth);
    const losses = new Set((this._view.byMetric().get("loss") ?? []).map((one) => one.of.split(" ")[0]));
    byId("scope-switch").hidden = this._runs.length > 0 || losses.size < 2;
    this._steps = this._tools.axis === "steps";
    this._clock = this._steps ? this._view.clock() : [];
    const end = Math.max(this._view.end, ...this._runs.map((run) => run.at.at(-1) ?? 0));
    [this._unit, this._scale] = this._steps ? ["", 1] : end < 600 ? [" s", 1] : end < 10800 ? [" min", 60] : [" h", 3600];
    const metrics = this._runs.length ? this._runs.flatMap((run) => Object.keys(run.curves)) : this._view.byMetric().keys();
    const rows = rowsOf(new Set(metrics));
    byId("chart-none").hidden = rows.length > 0;
    [this._named, this._colors] = [new Set(), palette()];
    const drawn = rows.map((row, index) => this._traces(row, index + 2));
    const positive = drawn.map((traces) => traces.every(({ y }) => y.every((value) => value === null || value > 0)));
    const first = !this._plot.on;
    window.Plotly.react(this._plot, [this._marks(), ...drawn.flat()], this._layout(rows, positive), {
      displaylogo: false, modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]] });
    if (first) {
      this._plot.on("plotly_relayout", () => this._placeMoment());
      this._plot.on("plotly_click", ({ points }) => this._onJump(this._toTime(points[0].x * this._scale)));
      this._plot.on("plotly_legendclick", ({ data, curveNumber }) => !this._runs.length || this._onLegend(data[curveNumber].meta));
    }
    this._placeMoment();
    this._restUntil = performance.now() + 9 * (performance.now() - began);
  }

  // The margins are ours, so the place of a moment is known without Plotly, which need not draw for it.
  _placeMoment() {
    const [low, high] = this._plot.layout?.xaxis.range ?? [0, 0];
    const x = this._t === null ? null : this._fromTime(this._t) / this._scale;
    this._moment.hidden = x === null || !(low <= x && x <= high);
    const share = (x - low) / (high - low);
    this._moment.style.transform = `translateX(${MARGIN.l + share * (this._plot.clientWidth - MARGIN.l - MARGIN.r)}px)`;
  }

  _fromTime(t) {
    return this._steps ? stepAt(this._clock, t) : t;
  }

  _toTime(x) {
    return this._steps ? this._clock.find(([, step]) => step >= x)?.[0] ?? this._view.end : x;
  }

  // ---- what Plotly is given ----------------------------------------------------------------------------------------

  _traces({ metrics }, axis) {
    const { scope } = this._tools;
    const weight = Number(this._tools.smooth);
    const several = this._runs.length > 0;
    const lines = several ? linesOfRuns(this._runs, metrics[0], this._steps) : linesOf(this._view, metrics, this._steps, scope);
    const names = [...new Set(lines.map((line) => line.of))];
    const many = names.length > NAMED && !several;
    for (const line of lines) {
      const place = many ? Number(/\d+/.exec(line.of) ?? 0) : names.indexOf(line.of);
      line.color = this._colors[`line-${place % COLORS}`];
      line.dash = DASHES[(several ? Math.floor(place / COLORS) : metrics.length > 1 ? line.kind : place) % DASHES.length];
    }
    const budget = Math.max(60, POINTS / lines.length);
    const drawn = (shape, more) => {
      const shaped = lines.map((line) => ({ ...line, points: thinned(shape(line.points), budget) }));
      const groups = many ? [...Map.groupBy(shaped, (line) => line.color).values()] : shaped.map((line) => [line]);
      return groups.map((some) => ({ ...this._trace(some, many), yaxis: `y${axis}`, ...more }));
    };
    const smooth = drawn((points) => smoothed(points, weight), {});
    return weight ? [...drawn((points) => points, FAINT), ...smooth] : smooth;
  }

  // A trace of one line, or of the lines that share a color, with nothing between two of them.
  _trace(lines, many) {
    const points = lines.flatMap((line) => [...line.points.map(([x, y]) => [x / this._scale, y, plain(line.label)]), [null, null, ""]]);
    const [{ of, label, color, dash }] = lines;
    const showlegend = !many && !this._named.has(of);
    this._named.add(of);
    return {
      type: "scatter", mode: points.length < 5 ? "lines+markers" : "lines", name: plain(label), legendgroup: of, meta: of, showlegend,
      x: points.map((point) => point[0]), y: points.map((point) => point[1]), text: points.map((point) => point[2]),
      hovertemplate: many ? "%{text}: %{y}<extra></extra>" : "%{y}",
      line: { color, dash: many ? "solid" : dash, width: many ? 1.2 : 2 },
      visible: this._runs.length && this._hidden.has(of) ? "legendonly" : true,
    };
  }

  _marks() {
    const { events } = this._view;
    const kinds = events.map(kindOf);
    return {
      type: "scatter", mode: "markers", showlegend: false, yaxis: "y", cliponaxis: false,
      x: events.map((event) => this._fromTime(event.at) / this._scale), y: events.map(() => 0),
      text: events.map((event, index) => plain(`${kinds[index][0]}: ${event.text}`)), hovertemplate: "%{text}<extra></extra>",
      marker: { symbol: kinds.map(([, mark]) => mark), color: kinds.map(([, , color]) => this._colors[color]), size: 9, line: { width: 2 } },
    };
  }

  _layout(rows, positive) {
    const { ink, muted: text, line: grid, surface: ground } = this._colors;
    const height = EVENTS + rows.length * ROW;
    const many = !this._runs.length && this._view.processes.length > NAMED;
    const axis = { gridcolor: grid, zerolinecolor: grid };
    const layout = {
      height: height + MARGIN.t + MARGIN.b, width: byId("charts").clientWidth, margin: MARGIN, uirevision: "kept",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: "system-ui, sans-serif", color: text },
      hovermode: many ? "closest" : "x unified", hoverlabel: { bgcolor: ground, bordercolor: grid, font: { color: ink } },
      // A finger scrolls the page, and the buttons zoom.
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", modebar: { color: text, activecolor: ink, bgcolor: ground },
      legend: { orientation: "h", y: 1, yanchor: "bottom", itemdoubleclick: false },
      xaxis: { ...axis, ticksuffix: this._unit, uirevision: this._unit + this._tools.axis, hoverformat: ".4~g", anchor: "free", position: 0,
        showspikes: true, spikemode: "across", spikesnap: "cursor", spikethickness: 1, spikedash: "solid", spikecolor: ink },
      yaxis: { domain: [1 - EVENTS / height, 1], range: [-1, 1], fixedrange: true, showticklabels: false, showgrid: false, zeroline: false },
      annotations: rows.map(({ title }, index) => ({ text: plain(title), showarrow: false, xref: "paper", yref: `y${index + 2} domain`,
        x: 0, y: 1, xanchor: "left", yanchor: "bottom", font: { color: ink, weight: 700 } })),
      shapes: this._marks().x.slice(-EVENT_LINES).map((x) => ({ type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", layer: "below",
        line: { color: grid, width: 1, dash: "dot" } })),
    };
    rows.forEach(({ fromZero, ticks }, index) => {
      const top = height - EVENTS - index * ROW;
      layout[`yaxis${index + 2}`] = { ...axis, domain: [(top - ROW + 12) / height, (top - TITLE) / height], nticks: 5, uirevision: this._tools.log,
        type: this._tools.log && positive[index] ? "log" : "linear", rangemode: fromZero ? "tozero" : "normal", tickformat: ticks?.replace(".3", "~") ?? "~g",
        hoverformat: ticks ?? ".4~g" };
    });
    return layout;
  }
}

// ---- the lines of a chart, with gaps, smoothed and thinned ------------------------------------------------------------

const compareNames = new Intl.Collator("en", { numeric: true }).compare;

/** The lines of a job in a chart: [{ of, kind, label, points: [[x, y or null]] }], workers before servers and the job. */
function linesOf(view, metrics, steps, scope) {
  const found = metrics.flatMap((metric, kind) => seriesOf(view, metric, scope).map(({ of, points }) => ({
    of, kind, label: labelOf(of, metric, metrics), points: drawn(view, of, points, steps) })));
  const order = ({ of }) => ["server", "job"].indexOf(of.split(" ")[0]);
  return found.sort((a, b) => order(a) - order(b) || compareNames(a.of, b.of) || a.kind - b.kind);
}

/** The lines of several runs in a chart, one for each. */
function linesOfRuns(runs, metric, steps) {
  return runs.filter((run) => run.curves[metric]).map(({ name, at, step, curves }) => (
    { of: name, kind: 0, label: name, points: curves[metric].map((y, index) => [(steps ? step : at)[index], y]) }));
}

function labelOf(of, metric, metrics) {
  const kind = metrics.length > 1 ? metric.split("_")[1] : "";
  return [of === "job" && kind ? "" : of, kind].filter(Boolean).join(" ");
}

function seriesOf(view, metric, scope) {
  const all = view.byMetric().get(metric) ?? [];
  const wanted = all.filter((one) => metric !== "loss" || one.of.startsWith(scope));
  return wanted.length ? wanted : all;
}

// After a restart steps are counted again, so a line over steps goes on further left, behind a gap.
function drawn(view, of, points, steps) {
  const [clock, breaks] = [steps ? view.clock() : [], view.breaks(of)];
  // A server counts updates, and not the steps of the job.
  const counts = !of.startsWith("server");
  const found = [];
  points.forEach(([at, step, value], index) => {
    const x = !steps ? at : counts ? step : stepAt(clock, at);
    if (index && breaks(points[index - 1][0], at)) found.push([x, null]);
    found.push([x, value]);
  });
  return found;
}

/** The step at a time, as these points have it. */
const stepAt = (clock, t) => clock[lastBefore(clock, t)]?.[1] ?? 0;

/** An exponential moving average as TensorBoard has it, its beginning corrected. weight: of what came before. */
function smoothed(points, weight) {
  let [sum, count] = [0, 0];
  return points.map(([x, y]) => {
    if (y === null) return [x, y];
    sum = sum * weight + y * (1 - weight);
    count += 1;
    return [x, sum / (1 - weight ** count)];
  });
}

/** At most about so many of the points, and all gaps. The server has left points out in the same way. */
function thinned(points, most) {
  const stride = Math.ceil(points.length / most);
  return points.filter(([, y], index) => y === null || index % stride === 0);
}
