// What is known of one job: the View of the server, its deltas, and look-ups by time. Events are folded by the server.

import { numberText } from "./elements.js";

/** How each state is called, in words. The style sheet has a shape for each of them. */
export const STATES = {
  computes: "computes", waits: "waits", applies: "applies", starting: "starts", restarts: "starts again",
  stopped: "stopped by a signal", dead: "dead", away: "away", finished: "finished",
};

/** A series keeps so many points. With more, every other one of its older half is dropped. */
const MOST_POINTS = 2400;

/** States in which a process sends and receives nothing. */
const SILENT = new Set(["dead", "away", "finished", "stopped"]);
/** States in which a process makes no figures: its curves break. */
const ABSENT = new Set(["dead", "away", "finished", "starting", "restarts"]);
/** A death is shown for so many seconds, also where the process is back before the next picture is drawn. */
const DEATH_SHOWN_S = 2;
// As in the terminal's report: this many times the median of the others of the group, or of the other groups.
const STRAGGLER_FACTOR = 1.5;
const STRAGGLER_POINTS = 5;

/** Return the index of the last entry whose first element is at most t, or -1. */
export function lastBefore(entries, t) {
  let low = 0;
  let high = entries.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (entries[middle][0] <= t) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** A job's View, and its deltas merged into it. */
export class JobView {
  constructor(view) {
    this.series = new Map();
    this.states = new Map();
    this.events = [];
    this.layoutVersion = 0;
    this.merge(view);
  }

  /** Add a delta, or a whole View to an empty one. */
  merge(delta) {
    this.job = delta.job;
    this.cursor = delta.cursor;
    if (delta.processes) {
      this.processes = delta.processes;
      this.layoutVersion += 1;
    }
    for (const part of delta.series) this._append(part);
    for (const [name, changes] of Object.entries(delta.states)) {
      this.states.set(name, [...(this.states.get(name) ?? []), ...changes]);
    }
    this.events = [...this.events, ...delta.story];
  }

  _append(part) {
    const known = this.series.get(part.id) ?? { ...part, points: [] };
    this.series.set(part.id, known);
    known.points.push(...part.points.filter((point) => point[2] !== null));
    if (known.points.length <= MOST_POINTS) return;
    known.points = known.points.filter((point, index) => index >= MOST_POINTS / 2 || index % 2 === 0);
  }

  /** Seconds since the start up to which something is known. */
  get end() {
    return Math.max(this.job.elapsed, this.job.ended ?? 0, 0.1);
  }

  /** Whether it runs, as far as is known. A lost job has ended without a word; it may be started again. */
  get running() {
    return this.job.ended === null && !this.job.lost;
  }

  /** The series that have a point, by metric. */
  byMetric() {
    return Map.groupBy([...this.series.values()].filter((one) => one.points.length), (one) => one.metric);
  }

  // The last points of a series at or before t: [time, step, value].
  _pointsAt(of, metric, t, count) {
    const points = this.series.get(`${of}:${metric}`)?.points ?? [];
    const end = lastBefore(points, t) + 1;
    return points.slice(Math.max(0, end - count), end);
  }

  _meanAt(of, metric, t) {
    const some = this._pointsAt(of, metric, t, STRAGGLER_POINTS);
    return some.reduce((sum, point) => sum + point[2], 0) / some.length;
  }

  /** The state of a process at t. "dead" for DEATH_SHOWN_S after a death, so that a quick return does not hide it. */
  stateAt(name, t) {
    const changes = this.states.get(name) ?? [];
    const last = lastBefore(changes, t);
    for (let index = last; changes[index]?.[0] > t - DEATH_SHOWN_S; index -= 1) {
      if (changes[index][1] === "dead") return "dead";
    }
    const state = changes[last]?.[1];
    return state in STATES ? state : "starting";
  }

  /** What map and table show of a process at t. A figure that is not known is undefined. */
  figuresAt({ name, role }, t) {
    const state = this.stateAt(name, t);
    const at = (metric) => this._pointsAt(name, metric, t, 1)[0];
    const gone = state === "dead" || state === "away";
    const [loss, waits, staleness, memory] = ["loss", "waiting_share", "staleness_mean", "memory_bytes"].map((metric) => (
      gone ? undefined : at(metric)?.[2]));
    const [rate, unit] = role === "worker" ? ["samples_per_s", " samples/s"] : ["updates_per_s", " updates/s"];
    const speed = numberText(SILENT.has(state) ? undefined : at(rate)?.[2], unit);
    return { state, step: (at("loss") ?? at("samples_per_s"))?.[1], speed, loss, waits, staleness, memory };
  }

  /** A function: whether a curve breaks between two times, as its process, or each worker of its group, was not there. */
  breaks(of) {
    const workers = this.processes.filter((one) => one.role === "worker" && `group ${one.group}` === of);
    const changes = (workers.length ? workers.map((one) => one.name) : [of]).map((name) => this.states.get(name) ?? []);
    return (from, to) => changes.every((some) => {
      let index = Math.max(0, lastBefore(some, from));
      while (some[index]?.[0] < to && !ABSENT.has(some[index][1])) index += 1;
      return some[index]?.[0] < to;
    });
  }

  /** The points of the longest curve that counts steps, [time, step, value]: which step was when. */
  clock() {
    const counting = [...this.series.values()].filter((one) => /^(group|worker) [\d/]+$/.test(one.of));
    return counting.map((one) => one.points).sort((a, b) => b.length - a.length)[0] ?? [];
  }

  /** How many times the median of the others each slow worker takes for a sample, waits not counted. */
  stragglersAt(t) {
    const workers = this.processes.filter((one) => one.role === "worker");
    const seconds = ({ name }) => Math.max(0.01, 1 - (this._meanAt(name, "waiting_share", t) || 0)) / this._meanAt(name, "samples_per_s", t);
    const own = workers.filter((one) => !SILENT.has(this.stateAt(one.name, t))).map((one) => [one, seconds(one)])
      .filter(([, time]) => Number.isFinite(time));
    const grouped = workers.some((one) => one.index > 0);
    return new Map(own.map(([one, time]) => {
      const others = own.filter(([other]) => other !== one && (!grouped || other.group === one.group)).map(([, theirs]) => theirs);
      // Of an even count the lower one: of two workers the slow one is told from the other.
      return [one.name, time / others.sort((a, b) => a - b)[(others.length - 1) >> 1]];
    }).filter(([, times]) => times > STRAGGLER_FACTOR));
  }
}
