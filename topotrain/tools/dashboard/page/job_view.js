// What is known of one job: the View of the server, its deltas, and look-ups by time. Events are folded by the server.

/** How each state is called, in the order of the legend. The style sheet has a shape for each of them. */
export const STATES = {
  computes: "computes",
  waits: "waits",
  applies: "applies",
  starting: "starts",
  restarts: "starts again",
  stopped: "stopped by a signal",
  dead: "dead",
  away: "away",
  finished: "finished",
};

/** States in which a process sends and receives nothing. */
export const SILENT = new Set(["dead", "away", "finished", "stopped"]);

/** A series keeps so many points. With more, every other one of its older half is dropped. */
const MOST_POINTS = 2400;
/** The events of a job that stay in the page. */
const MOST_EVENTS = 5000;

/** States in which a process makes no figures: its curves break. */
const ABSENT = new Set(["dead", "away", "finished"]);
const BEGINS = new Set(["starting", "restarts"]);

/** A death is shown for so many seconds, also where the process is back before the next picture is drawn. */
export const DEATH_SHOWN_S = 2;

// As in the terminal's report: this many times the median of the others of the group, or of the other groups.
const STRAGGLER_FACTOR = 1.5;
const SMOOTHED_POINTS = 5;

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

/** Return the middle of some numbers; of an even count, the lower one: of two workers the slow one is told from the other. */
export function median(values) {
  return [...values].sort((a, b) => a - b)[(values.length - 1) >> 1];
}

/** Return the spans that two lists of spans share. */
function bothIn(some, others) {
  return some.flatMap(([from, to]) => others.map(([start, end]) => [Math.max(from, start), Math.min(to, end)]))
    .filter(([from, to]) => from < to);
}

/** A job's View, and its deltas merged into it. */
export class JobView {
  constructor(view) {
    this.series = new Map();
    this.states = new Map();
    this.events = [];
    this.processes = [];
    this.job = {};
    this.layoutVersion = 0;
    this.merge(view);
  }

  /** Add a delta, or a whole View to an empty one. */
  merge(delta) {
    this.job = { ...this.job, ...(delta.job ?? {}) };
    this.cursor = delta.cursor;
    if (Array.isArray(delta.processes)) {
      this.processes = delta.processes;
      this.layoutVersion += 1;
    }
    for (const part of delta.series ?? []) this._append(part);
    for (const [name, changes] of Object.entries(delta.states ?? {})) {
      const known = this.states.get(name);
      if (known) known.push(...changes);
      else this.states.set(name, [...changes]);
    }
    for (const event of delta.story ?? []) this.events.push(event);
    if (this.events.length > MOST_EVENTS) this.events.splice(0, this.events.length - MOST_EVENTS);
  }

  _append(part) {
    const points = (part.points ?? []).filter((point) => Number.isFinite(point[0]) && Number.isFinite(point[2]));
    const known = this.series.get(part.id);
    if (!known) {
      this.series.set(part.id, { ...part, points });
      return;
    }
    for (const point of points) known.points.push(point);
    if (known.points.length > MOST_POINTS) {
      const half = known.points.length >> 1;
      known.points = known.points.filter((point, index) => index >= half || index % 2 === 0);
    }
  }

  /** Seconds since the start up to which something is known. */
  get end() {
    return Math.max(this.job.elapsed ?? 0, this.job.ended ?? 0, 0.1);
  }

  /** Whether the job has ended. */
  get over() {
    return this.job.ended !== null && this.job.ended !== undefined;
  }

  /** Whether it has ended without a word. It may go on, when it is started again. */
  get lost() {
    return this.job.lost === true;
  }

  /** Whether it runs, as far as is known. */
  get running() {
    return !this.over && !this.lost;
  }

  /** All series of a metric. */
  ofMetric(metric) {
    return [...this.series.values()].filter((one) => one.metric === metric);
  }

  /** All metrics that have a point. */
  metrics() {
    return new Set([...this.series.values()].filter((one) => one.points.length).map((one) => one.metric));
  }

  /** The last point of a series at or before t, or null. */
  pointAt(of, metric, t) {
    const found = this.series.get(`${of}:${metric}`);
    const index = found ? lastBefore(found.points, t) : -1;
    return index < 0 ? null : found.points[index];
  }

  /** The value of that point, or null. */
  valueAt(of, metric, t) {
    return this.pointAt(of, metric, t)?.[2] ?? null;
  }

  _smoothedAt(of, metric, t) {
    const points = this.series.get(`${of}:${metric}`)?.points ?? [];
    const last = lastBefore(points, t);
    if (last < 0) return null;
    const some = points.slice(Math.max(0, last + 1 - SMOOTHED_POINTS), last + 1);
    return some.reduce((sum, point) => sum + point[2], 0) / some.length;
  }

  /** The state of a process at t. "dead" for DEATH_SHOWN_S after a death, so that a quick return does not hide it. */
  stateAt(name, t) {
    const changes = this.states.get(name) ?? [];
    const last = lastBefore(changes, t);
    for (let index = last; index >= 0 && changes[index][0] > t - DEATH_SHOWN_S; index -= 1) {
      if (changes[index][1] === "dead") return "dead";
    }
    const state = last < 0 ? "starting" : changes[last][1];
    return state in STATES ? state : "starting";
  }

  /** When a process was not there: its spans [from, to] in seconds; `to` is Infinity if it is not back. */
  absences(name) {
    const found = [];
    let ended = false;
    for (const [at, state] of this.states.get(name) ?? []) {
      const open = found.at(-1)?.[1] === Infinity;
      if (ABSENT.has(state) && !open) found.push([at, Infinity]);
      // A process that starts has no figures yet.
      else if (open && !ABSENT.has(state) && !BEGINS.has(state)) found.at(-1)[1] = at;
      ended = state === "finished" && found.at(-1)?.[0] === at;
    }
    // Its last figures hold after its end, but not after a death.
    if (ended) found.pop();
    return found;
  }

  /** When nothing is known of a series: a process, a connection "a>b" or a group whose workers are all away. */
  gaps(of) {
    if (of.startsWith("group ")) {
      const workers = this.processes.filter((one) => one.role === "worker" && `group ${one.group}` === of);
      return workers.map((one) => this.absences(one.name)).reduce(bothIn, [[-Infinity, Infinity]])
        .filter(([from]) => from > -Infinity);
    }
    return of.replace(/ sends$/, "").split(">").flatMap((name) => this.absences(name)).sort((a, b) => a[0] - b[0]);
  }

  /** How many times the median of the others each slow worker takes for a sample, waits not counted. */
  stragglersAt(t) {
    const own = new Map();
    for (const process of this.processes) {
      if (process.role !== "worker" || SILENT.has(this.stateAt(process.name, t))) continue;
      const rate = this._smoothedAt(process.name, "samples_per_s", t);
      const waits = this._smoothedAt(process.name, "waiting_share", t) ?? 0;
      if (rate > 0) own.set(process, Math.max(0.01, 1 - waits) / rate);
    }
    const found = new Map();
    const grouped = this.processes.some((process) => process.role === "worker" && process.index > 0);
    for (const [process, seconds] of own) {
      const others = [...own].filter(([other]) => other !== process && (!grouped || other.group === process.group));
      const middle = median(others.map(([, theirs]) => theirs));
      if (seconds > STRAGGLER_FACTOR * middle) found.set(process.name, seconds / middle);
    }
    return found;
  }

  /** The process of this name, or undefined. */
  processOf(name) {
    return this.processes.find((one) => one.name === name);
  }

  /** The numbers of the worker groups, in order. */
  workerGroups() {
    const groups = this.processes.filter((one) => one.role === "worker").map((one) => one.group);
    return [...new Set(groups)].sort((a, b) => a - b);
  }
}
