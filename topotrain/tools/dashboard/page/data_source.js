// Where the page's data come from: the server of running or recorded jobs, or the file itself.

import { byId } from "./elements.js";
import { JobView } from "./job_view.js";

const SOURCE = document.documentElement.dataset.source;
const AGAIN_MS = 2000;
const RUNS_MS = 4000;
const NEW_RUNS_MS = 15000;
/** Waits while the page is in a tab that is not seen. */
const seen = () => document.hidden && new Promise((done) => { document.addEventListener("visibilitychange", done, { once: true }); });
const pause = (ms) => new Promise((done) => { setTimeout(done, ms); });

/** `live`: there is a server. Without one all data are in the page. */
export class DataSource {
  live = SOURCE !== "embedded";

  /** Call `listener.onView`, `onDelta`, `onRuns` and `onConnection` as data arrive. */
  constructor(listener) {
    this._listener = listener;
    this.follow(0);
    this._compare();
  }

  /** Show a run, by its number, and no other one any more: a whole View, then what is new, about once a second. */
  async follow(run) {
    this._run = run;
    let view = null;
    do {
      const data = await this._ask(`view?run=${run}${view === null ? "" : `&cursor=${view.cursor}`}`);
      if (this._run !== run) return;
      this._listener.onConnection(data === null ? "lost" : this.live && data.job.ended === null ? "live" : "recorded");
      if (data === null) {
        await pause(AGAIN_MS);
        continue;
      }
      // Whole: another job has begun in this workspace.
      const whole = view === null || data.whole;
      if (whole) view = new JobView(data);
      else view.merge(data);
      if (whole) this._listener.onView(view);
      else this._listener.onDelta();
    } while (this.live && (view === null || view.job.ended === null));
  }

  async _compare() {
    let runs = [];
    while (true) {
      // Null: nothing is new.
      const found = await this._ask(`runs?known=${runs.map((run) => run.cursor)}`);
      if (found?.length > 1) this._listener.onRuns(runs = found);
      if (SOURCE !== "live") return;
      // Another one may begin in a folder of runs at any time.
      await pause(runs.some((run) => run.running) ? RUNS_MS : NEW_RUNS_MS);
      await seen();
    }
  }

  // Null: there is no server any more.
  async _ask(what, form = "json") {
    if (!this.live) return JSON.parse(byId(`data-${what.split("?")[0]}`).textContent);
    try {
      const answer = await fetch(`api/${what}`);
      return answer.ok ? await answer[form]() : null;
    } catch {
      return null;
    }
  }

  /** The last lines of a process's log, or null. */
  async log(process) {
    if (!this.live) return (await this._ask("logs"))[process] ?? null;
    return this._ask(`log?run=${this._run}&process=${encodeURIComponent(process)}`, "text");
  }
}
