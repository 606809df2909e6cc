// The curves: one chart for each metric that the job has, over time or over steps, of one run or of two.

import { byId, clockText, make, metricText, numberText, setText } from "./elements.js";
import { lastBefore } from "./job_view.js";
import { DASHES, LineChart, lineValue, NAMED, niceTicks } from "./line_chart.js";

const COLOURS = 6;
const SUMMARY_POINTS = 300;
/** With more connections than these there is one line for each process that sends. */
const CONNECTIONS = 48;

/** The charts in their order: a title, the metrics with the dash of each, and whether the axis begins at 0. */
const CHARTS = [
  { id: "loss", title: "Loss", metrics: { loss: 0 }, fromZero: false },
  { id: "samples_per_s", title: "Samples per second", metrics: { samples_per_s: 0 }, fromZero: true },
  { id: "staleness", title: "Staleness in versions", fromZero: true,
    metrics: { staleness_mean: 0, staleness_p95: 1, staleness_max: 2, staleness_bound: 5 } },
  { id: "waiting_share", title: "Share of time spent waiting", metrics: { waiting_share: 0 }, fromZero: true },
  { id: "bytes_per_s", title: "Bytes per second", metrics: { bytes_per_s: 0 }, fromZero: true },
  { id: "memory_bytes", title: "Memory of each process", metrics: { memory_bytes: 0 }, fromZero: true },
  { id: "updates_per_s", title: "Updates per second of each server", metrics: { updates_per_s: 0 }, fromZero: true },
];
const LINE_NAMES = { staleness_mean: "mean", staleness_p95: "p95", staleness_max: "max", staleness_bound: "bound" };

const compareNames = new Intl.Collator("en", { numeric: true }).compare;

// Workers come before servers, so that a worker has the same colour in all charts.
function inOrder(a, b) {
  return Number(a.startsWith("server")) - Number(b.startsWith("server")) || compareNames(a, b);
}

function timeTicks(end, count) {
  const steps = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];
  const step = steps.find((size) => end / size <= count) ?? 86400 * Math.ceil(end / 86400 / count);
  return Array.from({ length: Math.floor(end / step + 1e-9) + 1 }, (_, index) => index * step);
}

/** Return a function that gives the job's step at a time, on straight lines between known points. */
function stepClock(view) {
  const having = [...view.series.values()].filter((one) => (
    !one.of.startsWith("server") && one.points.length && one.points.at(-1)[1] > 0));
  const losses = having.filter((one) => one.metric === "loss");
  const [longest] = (losses.length ? losses : having).sort((a, b) => b.points.length - a.points.length);
  const points = longest?.points ?? [];
  return (t) => {
    const index = lastBefore(points, t);
    if (index < 0) return 0;
    const [at, step] = points[index];
    const next = points[index + 1];
    return next && next[0] > at ? step + ((next[1] - step) * (t - at)) / (next[0] - at) : step;
  };
}

/** Return the time of a step: the other way round, by halving. */
function timeOfStep(clock, step, end) {
  let [low, high] = [0, end];
  for (let turn = 0; turn < 40; turn += 1) {
    const middle = (low + high) / 2;
    if (clock(middle) < step) low = middle;
    else high = middle;
  }
  return high;
}

// Beyond six names a group has a colour, and its members differ by dashes.
function dashOf(of) {
  const [group = 0, ...rest] = (of.match(/\d+/g) ?? []).map(Number);
  return ((rest.at(-1) ?? 0) + Math.floor(group / COLOURS)) % DASHES.length;
}

/** The median of some lines of a run, at evenly spaced places, and their range. */
function summaryOf(lines, run, xEnd) {
  const [points, band] = [[], []];
  const end = Math.min(xEnd, Math.max(...lines.map((line) => line.points.at(-1)[0])));
  let gap;
  for (let place = 0; place <= SUMMARY_POINTS; place += 1) {
    const x = (end * place) / SUMMARY_POINTS;
    const values = lines.map((line) => lineValue(line, x)).filter((value) => value !== null).sort((a, b) => a - b);
    if (!values.length) {
      if (points.length) gap ??= x;
      continue;
    }
    points.push([x, (values[(values.length - 1) >> 1] + values[values.length >> 1]) / 2, gap]);
    gap = undefined;
    band.push([x, values[0], values.at(-1)]);
  }
  const [colour, dash] = run === "A" ? [0, 0] : [1, 1];
  return { run, label: `${run}: median of ${lines.length}`, colour, dash, width: 2, kind: null, level: false, until: Infinity, points, band };
}

/** All charts of the page. */
export class Curves {
  constructor(onJump) {
    this._grid = byId("curve-grid");
    this._onJump = onJump;
    this._charts = new Map();
    this._views = new Map();
    this._waiting = new Set();
    this._visible = new Set();
    this._chosen = null;
    this._seen = new IntersectionObserver((entries) => this._onSeen(entries), { rootMargin: "200px" });
    new ResizeObserver(() => this.redraw()).observe(this._grid);
    for (const name of ["axis", "scope"]) {
      for (const input of document.querySelectorAll(`input[name="${name}"]`)) {
        input.addEventListener("change", () => this.redraw());
      }
    }
  }

  /** Show a run's data: "A" is the job of the page, "B" the one laid over it. */
  show(run, view) {
    this._views.set(run, view);
    this.redraw();
  }

  /** Set the moment of the replay; null: the end. */
  setMoment(t) {
    this._t = t;
    const x = t === null ? null : this._fromTime(t);
    // The others get it when they come into sight.
    for (const id of this._visible) if (this._charts.get(id).ready) this._charts.get(id).chart.setMoment(x);
  }

  /** Emphasize one event's mark on all curves. */
  choose(event) {
    this._chosen = event;
    this.redraw();
  }

  /** Read the colours again. */
  recolour() {
    for (const { chart } of this._charts.values()) chart.recolour();
  }

  /** Draw again what can be seen; one chart in each frame, so that nothing else has to wait. */
  redraw() {
    const main = this._views.get("A");
    if (!main) return;
    this._findCharts();
    for (const id of this._charts.keys()) this._waiting.add(id);
    this._frame ??= requestAnimationFrame(() => this._drawNext());
  }

  _drawNext() {
    this._frame = undefined;
    const next = [...this._waiting].find((id) => this._visible.has(id));
    if (next === undefined) return;
    this._waiting.delete(next);
    this._draw(next);
    this._frame = requestAnimationFrame(() => this._drawNext());
  }

  _onSeen(entries) {
    for (const entry of entries) {
      const id = entry.target.dataset.chart;
      if (entry.isIntersecting) {
        this._visible.add(id);
        this._waiting.add(id);
      } else {
        this._visible.delete(id);
      }
    }
    this._frame ??= requestAnimationFrame(() => this._drawNext());
  }

  get _overSteps() {
    return document.querySelector('input[name="axis"]:checked').value === "steps";
  }

  _findCharts() {
    const metrics = new Set([...this._views.values()].flatMap((view) => [...view.metrics()]));
    const known = new Set(CHARTS.flatMap((one) => Object.keys(one.metrics)));
    // What scripts log, and evaluations, have names of their own.
    const own = [...metrics].filter((name) => !known.has(name)).sort(inOrder).map((name) => (
      { id: name, title: name.replace(/^log:/, "").replace(":", ": "), metrics: { [name]: 0 }, fromZero: false }));
    const wanted = [...CHARTS, ...own].filter((one) => Object.keys(one.metrics).some((name) => metrics.has(name)));
    byId("curve-none").hidden = wanted.length > 0;
    const losses = new Set(this._views.get("A").ofMetric("loss").map((one) => one.of.split(" ")[0]));
    byId("scope-switch").hidden = !(losses.has("group") && losses.has("worker"));
    for (const [id, { chart }] of this._charts) {
      if (!wanted.some((one) => one.id === id)) this._remove(id, chart.element);
    }
    for (const spec of wanted) {
      if (this._charts.has(spec.id)) continue;
      const chart = new LineChart(spec.title, { onCursor: (x) => this._setCursor(x), onJump: (x) => this._onJump(this._toTime(x)) });
      chart.element.dataset.chart = spec.id;
      this._charts.set(spec.id, { spec, chart, ready: false });
      this._place(spec.id, chart.element, [...CHARTS.map((one) => one.id)]);
      this._seen.observe(chart.element);
    }
    this._runKey();
  }

  // Of a job that another one has followed in its workspace.
  _remove(id, element) {
    this._seen.unobserve(element);
    for (const known of [this._charts, this._waiting, this._visible]) known.delete(id);
    element.remove();
  }

  _place(id, element, order) {
    const rank = (name) => (order.includes(name) ? order.indexOf(name) : order.length);
    const after = [...this._grid.children].find((other) => rank(other.dataset.chart) > rank(id));
    this._grid.insertBefore(element, after ?? null);
  }

  _runKey() {
    const other = this._views.get("B");
    const key = byId("run-key");
    key.hidden = !other;
    const [first, second] = other ? [this._nameOf("A"), this._nameOf("B")] : [];
    if (other) setText(key, `A, solid: ${first}. B, dashed: ${second}. The marks are the events of A, ${first}.`);
  }

  _nameOf(run) {
    const { name, workspace } = this._views.get(run).job;
    const other = this._views.get(run === "A" ? "B" : "A");
    const same = other && other.job.name === name;
    return String((same ? String(workspace ?? "").split("/").filter(Boolean).at(-1) : name) ?? run);
  }

  _fromTime(t) {
    return this._overSteps ? (this._clock ?? stepClock(this._views.get("A")))(t) : t;
  }

  _toTime(x) {
    return this._overSteps ? timeOfStep(stepClock(this._views.get("A")), x, this._views.get("A").end) : x;
  }

  _setCursor(x) {
    for (const id of this._visible) if (this._charts.get(id).ready) this._charts.get(id).chart.setCursor(x);
  }

  _draw(id) {
    const entry = this._charts.get(id);
    const steps = this._overSteps;
    this._clock = steps ? stepClock(this._views.get("A")) : null;
    const lines = [...this._views.keys()].sort().flatMap((run) => this._lines(entry.spec, run));
    const xEnd = Math.max(steps ? 1 : 0.1, ...[...this._views.values()].map((view) => steps ? stepClock(view)(view.end) : view.end));
    const plain = this._summarized(lines.filter((line) => line.points.length), xEnd);
    const [low, high] = this._limits(plain, entry.spec.fromZero);
    const [metric] = Object.keys(entry.spec.metrics);
    entry.ready = true;
    entry.chart.draw({
      lines: plain, low, high, xEnd, marks: this._marks(),
      xText: steps ? (x) => `step ${numberText(Math.round(x))}` : (x) => (xEnd < 10 ? `${numberText(x)} s` : clockText(x)),
      xTicks: steps ? (end, count) => niceTicks(0, end, count).filter((tick) => Number.isInteger(tick)) : timeTicks,
      yText: (value) => metricText(metric, value),
    });
    entry.chart.setMoment(this._t === null || this._t === undefined ? null : this._fromTime(this._t));
  }

  // Of two runs with many lines: one line for each run, the median, with a band from the lowest to the highest line.
  _summarized(lines, xEnd) {
    if (this._views.size < 2 || lines.length <= NAMED) return lines;
    return [...this._views.keys()].sort().flatMap((run) => {
      const some = lines.filter((line) => line.run === run);
      return some.length > 1 ? [summaryOf(some, run, xEnd)] : some;
    });
  }

  _limits(lines, fromZero) {
    let [low, high] = [Infinity, -Infinity];
    for (const line of lines) {
      for (const [, y] of line.points) {
        if (y < low) low = y;
        if (y > high) high = y;
      }
      for (const [, least, most] of line.band ?? []) [low, high] = [Math.min(low, least), Math.max(high, most)];
    }
    if (!Number.isFinite(low)) return [0, 1];
    if (fromZero) low = Math.min(0, low);
    const room = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
    return [fromZero && low === 0 ? 0 : low - room, high + room];
  }

  _marks() {
    const view = this._views.get("A");
    const clock = this._overSteps ? stepClock(view) : null;
    return view.events.map((event) => (
      { x: clock ? clock(event.at) : event.at, kind: event.kind, chosen: event === this._chosen }));
  }

  _lines(spec, run) {
    const view = this._views.get(run);
    const two = this._views.size > 1;
    const found = Object.entries(spec.metrics).flatMap(([metric, dash]) => (
      this._wanted(view.ofMetric(metric), metric).map((one) => ({ one, dash }))));
    // Two runs have two kinds of dashes already: of what has several lines only the first one is compared.
    const some = two ? found.filter(({ dash }) => dash === 0) : found;
    const names = [...new Set(some.map(({ one }) => one.of))].filter((of) => of !== "job").sort(inOrder);
    if (!names.length) names.push("job");
    const clock = this._overSteps ? stepClock(view) : null;
    const several = Object.keys(spec.metrics).length > 1 && !two;
    some.sort((a, b) => inOrder(a.one.of, b.one.of) || a.dash - b.dash);
    return some.map(({ one, dash }) => ({
      run,
      label: this._label(one, run, two, several && names.length),
      colour: one.metric === "staleness_bound" ? 5 : this._colour(one.of, names),
      dash: two ? (run === "A" ? 0 : 1) : several ? dash : names.length <= COLOURS ? names.indexOf(one.of) : dashOf(one.of),
      width: names.length > COLOURS ? 1.2 : 2,
      kind: several ? LINE_NAMES[one.metric] : null,
      level: one.metric === "staleness_bound",
      ...this._drawn(one, view.gaps(one.of), clock),
    }));
  }

  // The points of a line: [x, y], and the x at which a gap before the point begins. `until`: where the line ends early.
  _drawn(one, gaps, clock) {
    const place = clock ?? ((t) => t);
    const broken = new Map();
    let [index, until] = [0, Infinity];
    for (const [from, to] of gaps) {
      while (index < one.points.length && one.points[index][0] <= from) index += 1;
      if (index === one.points.length) until = Math.min(until, to === Infinity ? place(from) : Infinity);
      else if (index > 0 && !broken.has(index)) broken.set(index, place(from));
    }
    const points = one.points.map((point, at) => [point[0], point[2], broken.get(at)]);
    return { until, points: clock ? this._overStepsOf(one, clock, broken) : points };
  }

  _overStepsOf({ of, points }, clock, broken) {
    // A server counts updates, and not the steps of the job.
    const counts = !of.startsWith("server");
    const found = points.map((point, at) => [counts && point[1] > 0 ? point[1] : clock(point[0]), point[2], broken.get(at)]);
    let last = -Infinity;
    // After a restart a step is counted again: only the newest values of it are drawn.
    const kept = [];
    for (let index = found.length - 1; index >= 0; index -= 1) {
      if (kept.length && found[index][0] > last) continue;
      last = found[index][0];
      kept.push(found[index]);
    }
    // Between the last step before a gap and the first one after it.
    for (const point of kept) if (point[2] !== undefined) point[2] = Math.min(point[2], point[0]);
    return kept.reverse();
  }

  _wanted(series, metric) {
    const filled = series.filter((one) => one.points.length);
    if (metric === "bytes_per_s" && filled.length > CONNECTIONS) return this._bySender(filled);
    if (metric !== "loss") {
      // A job's or a group's sum beside each worker's figure would only flatten those.
      const single = filled.filter((one) => !/^(job|group )/.test(one.of));
      return single.length ? single : filled;
    }
    const scope = document.querySelector('input[name="scope"]:checked').value;
    const first = filled.filter((one) => one.of.startsWith(scope === "groups" ? "group" : "worker"));
    return first.length ? first : filled;
  }

  _bySender(series) {
    const senders = new Map();
    for (const { of, points, metric } of series) {
      const [from] = of.split(">");
      if (!senders.has(from)) senders.set(from, { of: `${from} sends`, metric, sums: new Map() });
      const { sums } = senders.get(from);
      // A process reports the bytes to all others at one time.
      for (const [at, step, value] of points) sums.set(at, [at, step, (sums.get(at)?.[2] ?? 0) + value]);
    }
    return [...senders.values()].map(({ of, metric, sums }) => ({ of, metric, points: [...sums.values()].sort((a, b) => a[0] - b[0]) }));
  }

  _label(one, run, two, names) {
    const of = one.of.replace(">", " → ");
    const metric = LINE_NAMES[one.metric];
    const own = metric && names ? (one.of === "job" ? metric : `${of} ${metric}`) : of;
    return two ? `${run} ${own}` : own;
  }

  _colour(of, names) {
    if (names.length <= COLOURS) return names.indexOf(of);
    const group = /(\d+)(\/\d+)?/.exec(of);
    return group ? Number(group[1]) % COLOURS : 0;
  }
}
