// The lines of a chart: which series of a job it has, over time or over steps, with gaps, smoothed and thinned.

import { lastBefore } from "./job_view.js";

export const compareNames = new Intl.Collator("en", { numeric: true }).compare;

/** The lines of a job in a chart: [{ of, kind, label, points: [[x, y or null]] }], workers before servers and the job. */
export function linesOf(view, metrics, steps, scope) {
  const found = metrics.flatMap((metric, kind) => seriesOf(view, metric, scope).map(({ of, points }) => ({
    of, kind, label: labelOf(of, metric, metrics), points: drawn(view, of, points, steps) })));
  const order = ({ of }) => ["server", "job"].indexOf(of.split(" ")[0]);
  return found.sort((a, b) => order(a) - order(b) || compareNames(a.of, b.of) || a.kind - b.kind);
}

/** The lines of several runs in a chart, one for each. */
export function linesOfRuns(runs, metric, steps) {
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
export const stepAt = (clock, t) => clock[lastBefore(clock, t)]?.[1] ?? 0;

/** An exponential moving average as TensorBoard has it, its beginning corrected. weight: of what came before. */
export function smoothed(points, weight) {
  let [sum, count] = [0, 0];
  return points.map(([x, y]) => {
    if (y === null) return [x, y];
    sum = sum * weight + y * (1 - weight);
    count += 1;
    return [x, sum / (1 - weight ** count)];
  });
}

/** At most about so many of the points, and all gaps. The server has left points out in the same way. */
export function thinned(points, most) {
  const stride = Math.ceil(points.length / most);
  return points.filter(([, y], index) => y === null || index % stride === 0);
}
