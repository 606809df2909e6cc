// The page: data come in, the moment is chosen, and every part shows the job at that moment.

import { Curves } from "./curves.js";
import { dataSource } from "./data_source.js";
import { ProcessDetails } from "./details.js";
import { byId, clockText, fillFigures, metricText, numberText, setText } from "./elements.js";
import { EventList } from "./event_list.js";
import { MapView } from "./map_view.js";
import { ProcessTable } from "./process_table.js";
import { ReplayBar } from "./replay.js";

const THEME = "topotrain-theme";

const CONNECTIONS = {
  live: "running", recorded: "recorded", lost: "connection lost, trying again", waiting: "connecting",
};

class Page {
  constructor() {
    this._view = null;
    this._selected = null;
    this._chosen = null;
    this._connection = "waiting";
    this._source = dataSource();
    this._map = new MapView((name) => this._select(name));
    this._table = new ProcessTable((name) => this._showLog(name));
    this._details = new ProcessDetails(this._source, () => this._closeDetails());
    this._events = new EventList((event) => this._choose(event));
    this._curves = new Curves((t) => this._goTo(t));
    this._bar = new ReplayBar(() => this._showMoment());
    new Theme(() => this._curves.recolour());
    new ResizeObserver(() => this._revealed && this._events.reveal(this._revealed)).observe(byId("details"));
    for (const kind of ["wheel", "touchmove", "pointerdown", "keydown"]) {
      document.addEventListener(kind, () => this._reveal(null), { capture: true, passive: true });
    }
    this.onConnection("waiting");
  }

  /** Begin to receive data. */
  start() {
    try {
      this._source.start(this);
    } catch (error) {
      this._problem(`The data of this page cannot be read: ${error.message}`);
    }
  }

  /** A whole View of a run has come. */
  onView(run, view) {
    this._curves.show(run, view);
    if (run !== "A") return;
    this._view = view;
    setText(byId("block-text"), view.job.block ?? "");
    byId("block").hidden = !view.job.block;
    this._arrived();
  }

  /** New data have been added to a run's View. */
  onDelta(run, view) {
    this._curves.show(run, view);
    if (run !== "A") return;
    this._arrived();
    if (view.running) this._details.refresh();
  }

  /** The state of the connection to the server. */
  onConnection(state) {
    this._connection = state;
    document.body.dataset.connection = state;
    this._chip();
  }

  _arrived() {
    const view = this._view;
    this._header();
    this._chip();
    this._events.update(view);
    this._bar.setEnd(view.end, view.running && this._source.live);
    this._bar.setEvents(view.events);
    this._showMoment();
  }

  _showMoment() {
    if (!this._view) return;
    const { t, follows } = this._bar;
    this._map.update(this._view, t);
    this._table.update(this._view, t);
    this._details.update(this._view, t);
    this._events.setMoment(t, this._chosen);
    this._curves.setMoment(follows ? null : t);
  }

  _header() {
    const { job } = this._view;
    setText(byId("job-name"), job.name ?? "topotrain");
    setText(byId("job-framework"), job.framework ?? "");
    document.title = `${job.name ?? "job"} – topotrain`;
    const { progress } = job;
    const bar = byId("job-progress");
    bar.hidden = !Number.isFinite(progress);
    if (!bar.hidden) bar.value = progress;
    const pairs = [["elapsed", clockText(job.elapsed ?? 0)]];
    if (Number.isFinite(progress)) pairs.push(["done", `${Math.floor(progress * 100)} %`]);
    if (this._view.running && Number.isFinite(job.eta_s)) pairs.push(["left", `about ${clockText(job.eta_s)}`]);
    if (Number.isFinite(job.epoch) && job.epoch >= 0) pairs.push(["epoch", numberText(job.epoch + 1)]);
    if (job.step > 0) pairs.push(["step", numberText(job.step)]);
    if (Number.isFinite(job.loss)) pairs.push(["loss", metricText("loss", job.loss)]);
    if (Number.isFinite(job.samples_per_s)) pairs.push(["samples/s", numberText(job.samples_per_s)]);
    fillFigures(byId("job-figures"), pairs);
  }

  _chip() {
    const [state, text] = this._state();
    setText(byId("connection"), text);
    byId("connection").dataset.state = state;
  }

  _state() {
    const { code } = this._view?.job ?? {};
    if (this._view?.over) return code ? ["failed", `failed, code ${code}`] : ["ended", "ended"];
    if (this._view?.lost) return ["failed", "lost: its launcher is gone"];
    return [this._connection, CONNECTIONS[this._connection]];
  }

  _select(name) {
    this._selected = name;
    this._map.select(name);
    this._details.select(name);
    this._showMoment();
  }

  _showLog(name) {
    this._select(name);
    byId("details").scrollIntoView({ block: "nearest" });
  }

  _closeDetails() {
    const name = this._selected;
    this._select(null);
    this._map.focus(name);
  }

  _choose(event) {
    this._chosen = event;
    this._curves.choose(event);
    if (this._view.processOf(event.of)) this._select(event.of);
    this._bar.goTo(event.at);
    this._reveal(event);
  }

  // The panel of the process opens above the list and grows with its log: the row stays in sight until the reader moves on.
  _reveal(event) {
    this._revealed = event;
    if (event) this._events.reveal(event);
  }

  _goTo(t) {
    this._bar.goTo(t);
  }

  _problem(text) {
    const place = byId("problem");
    place.hidden = false;
    setText(place, text);
  }
}

/** Light, dark, or what the system says. */
class Theme {
  constructor(onChange) {
    this._choice = byId("theme");
    this._onChange = onChange;
    this._system = window.matchMedia("(prefers-color-scheme: dark)");
    try {
      this._choice.value = localStorage.getItem(THEME) ?? "auto";
    } catch {
      // A mailed file may have no storage; then the choice lasts as long as the page.
    }
    if (!this._choice.value) this._choice.value = "auto";
    this._choice.addEventListener("change", () => this._chosen());
    this._system.addEventListener("change", () => this._apply());
    this._apply();
  }

  _chosen() {
    try {
      localStorage.setItem(THEME, this._choice.value);
    } catch {
      // As above.
    }
    this._apply();
  }

  _apply() {
    const dark = this._choice.value === "dark" || (this._choice.value === "auto" && this._system.matches);
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    this._onChange();
  }
}

new Page().start();
