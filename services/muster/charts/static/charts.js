// <job-curves>: a grid of charts over steps, tokens or time, from documents of GET /api/v1/jobs/{id}/curves.
//
// The element holds <script type="application/json"> with [{name, src, curves}]: `curves` is drawn at once, `src` is
// asked for what is newer or nearer. Its other children are for readers without scripts. With data-live="5" it asks
// anew every five seconds; where the series of data-gap-series is missing it shows data-gap. Strings reach the page as text only.
(() => {
  "use strict";

  const { TITLES, AXES, whole, el, formatBytes, formatValue, formatTicks, formatPlace, titleOf, smoothed, drawable, faint, nearest, valueTable,
    RANKS, isRank, isBytes, ranksOf, rankPlace } =
    globalThis.curveValues;
  const DASHES = [[], [9, 4], [2, 3], [12, 4, 2, 4]];
  const COLOURS = 8;
  const POINTS = 600;
  const HEIGHT = 210, LARGE_HEIGHT = 320;
  // A megabyte more would look like a leak beside nothing but itself.
  const fromZero = (name) => name === "mfu" || name.startsWith("hardware.") || isBytes(name);
  const POWERS_OF_TWO = Array.from({ length: 60 }, (_, power) => 2 ** power);
  const STORED = "muster-charts"; // the reader's choice: {order, pinned, large} of charts by name
  const NEAR_PIXELS = 6;
  const CATCH_UP_MILLISECONDS = 150;
  const DETAIL_MILLISECONDS = 250;

  // -- one chart -------------------------------------------------------------------------------------------------------

  // The lines of one metric: [{label, job, kind, table}], a table being places and one column of values.
  function linesOf(grid, name) {
    if (name === RANKS) return rankLines(grid);
    const found = [];
    grid.documents.forEach((curves, job) => {
      if (!curves || grid.hiddenJobs.has(job)) return;
      const series = curves.series[name], evaluated = curves.evaluations.series[name];
      const add = (kind, axes, column) =>
        found.push({ job, kind, table: drawable(axes[grid.axis], [column], grid.log) });
      if (series && grid.smoothing > 0) {
        add("raw", curves.axes, series.mean);
        add("line", curves.axes, smoothed(series.mean, grid.smoothing));
      } else if (series) {
        if (series.min) {
          add("max", curves.axes, series.max);
          add("min", curves.axes, series.min);
        }
        add("line", curves.axes, series.mean);
      }
      if (evaluated) add("evaluation", curves.evaluations.axes, evaluated.mean);
    });
    return found;
  }

  // One line for each rank of a job, each in a colour of its own.
  function rankLines(grid) {
    const [curves] = grid.documents;
    return ranksOf(curves).map(([label, series], rank) => {
      const column = grid.smoothing > 0 ? smoothed(series.mean, grid.smoothing) : series.mean;
      return { job: 0, kind: "line", label, colour: rank, table: drawable(curves.axes[grid.axis], [column], grid.log) };
    });
  }

  // As wide as the longest label of the axis, so that none is cut. uPlot asks again until that is settled.
  function labelRoom(plot, labels, at, cycle) {
    const axis = plot.axes[at];
    if (cycle > 1) return axis._size;
    plot.ctx.font = axis.font[0];
    const longest = Math.max(0, ...(labels ?? []).map((label) => plot.ctx.measureText(label ?? "").width));
    return Math.max(42, Math.ceil(longest / devicePixelRatio) + axis.ticks.size + axis.gap + 4);
  }

  class Chart {
    constructor(grid, name) {
      this.grid = grid;
      this.name = name;
      this.title = titleOf(name);
      this.readout = el("output", { class: "curve-readout" });
      this.holder = el("div", {
        class: "curve-plot", tabindex: "0", role: "group", "aria-roledescription": "chart",
        onkeydown: (event) => this.press(event),
        onfocus: () => this.readout.setAttribute("aria-live", "polite"),
        onblur: () => this.readout.removeAttribute("aria-live"),
      });
      this.tools = el("span", { class: "curve-actions" },
        this.tool("pin", `Pin ${this.title} first`, () => grid.choice.pin(name)),
        this.tool("before", `Move ${this.title} back`, () => grid.move(name, -1)),
        this.tool("after", `Move ${this.title} on`, () => grid.move(name, 1)),
        this.tool("large", `Enlarge ${this.title}`, () => grid.choice.enlarge(name)));
      const caption = el("figcaption", {}, el("strong", {}, this.title), this.readout, this.tools);
      this.figure = el("figure", { class: "curve" }, caption, this.holder);
    }

    tool(kind, label, act) {
      return el("button", { type: "button", class: `curve-tool curve-tool-${kind}`, "aria-label": label, title: label,
        onclick: (event) => { act(); this.grid.draw(); event.currentTarget.focus(); } });
    }

    get large() {
      return this.grid.choice.large(this.name);
    }

    get width() {
      return Math.max(180, this.figure.clientWidth - 16);
    }

    get height() {
      return this.large ? LARGE_HEIGHT : HEIGHT;
    }

    dress() {
      this.figure.classList.toggle("curve-large", this.large);
      this.tools.querySelector(".curve-tool-large").setAttribute("aria-pressed", String(this.large));
      this.tools.querySelector(".curve-tool-pin").setAttribute("aria-pressed", String(this.grid.choice.pinned(this.name)));
    }

    draw() {
      this.dress();
      this.lines = linesOf(this.grid, this.name);
      const data = this.lines.length ? uPlot.join(this.lines.map((line) => line.table)) : [[]];
      const shape = JSON.stringify([this.grid.axis, this.grid.log, this.lines.map(({ job, kind, label }) => [job, kind, label])]);
      if (shape !== this.shape) {
        this.plot?.destroy();
        this.shape = shape;
        this.plot = new uPlot(this.options(), data, this.holder);
      } else {
        this.plot.setData(data, false);
        this.resize();
      }
      this.place();
      this.holder.setAttribute("aria-label", this.summary());
      this.show(null);
    }

    place() {
      const { zoom } = this.grid;
      const places = this.plot.data[0];
      if (!places.length) return;
      const [min, max] = zoom ?? [places[0], places[places.length - 1]];
      this.plot.setScale("x", { min, max: max > min ? max : min + 1 });
    }

    resize() {
      if (!this.plot || (this.plot.width === this.width && this.plot.height === this.height)) return;
      this.plot.setSize({ width: this.width, height: this.height });
    }

    options() {
      const { grid, name } = this, style = getComputedStyle(grid);
      const text = style.getPropertyValue("--chart-text"), lines = style.getPropertyValue("--chart-grid");
      const axis = { stroke: text, font: `11px ${style.fontFamily}`, grid: { stroke: lines, width: 1 }, ticks: { stroke: lines, width: 1, size: 5 } };
      const bands = this.lines.flatMap((line, i) =>
        line.kind === "max" ? [{ series: [i + 1, i + 2], fill: faint(grid.colour(line.job), 0.2) }] : []);
      return {
        width: this.width, height: this.height, bands, legend: { show: false },
        cursor: {
          sync: { key: grid.key }, drag: { x: true, y: false, setScale: false }, points: { size: 7 },
          bind: { dblclick: () => () => grid.setZoom(null) },
        },
        scales: { x: { time: false, auto: false }, y: { distr: grid.log ? 3 : 1, auto: true, ...(fromZero(name) && !grid.log ? { range: (_, low, high) => [Math.min(0, low), high > 0 ? high * 1.1 : 1] } : {}) } },
        axes: [
          { ...axis, space: 70, size: 28, values: (_, ticks) => ticks.map((value) => formatPlace(grid.axis, value)) },
          { ...axis, size: labelRoom, values: (_, ticks) => formatTicks(name, ticks, grid.log),
            ...(isBytes(name) ? { incrs: POWERS_OF_TWO } : {}) },
        ],
        series: [{}, ...this.lines.map((line) => this.stroke(line))],
        hooks: {
          draw: [(plot) => this.markAttempts(plot)],
          setCursor: [(plot) => this.show(plot.cursor.idx)],
          setSelect: [(plot) => this.select(plot)],
        },
      };
    }

    stroke({ job, kind, colour: own = job }) {
      const colour = this.grid.colour(own), dash = DASHES[(Math.floor(own / 2) + Math.floor(own / COLOURS)) % DASHES.length];
      const common = { spanGaps: true, points: { show: false } };
      if (kind === "max" || kind === "min") return { ...common, stroke: "transparent", width: 0 };
      if (kind === "raw") return { ...common, stroke: faint(colour, 0.3), width: 1 };
      if (kind === "line") return { ...common, stroke: colour, width: 1.6, dash };
      const ground = getComputedStyle(this.grid).getPropertyValue("--chart-surface").trim();
      return { ...common, stroke: colour, width: 1, dash: [3, 3], points: { show: true, size: 7, width: 1.6, fill: ground, stroke: colour } };
    }

    // Where an attempt went on after another: a line with its number.
    markAttempts(plot) {
      const { ctx, bbox } = plot;
      ctx.save();
      ctx.textAlign = "left";
      ctx.font = `${11 * devicePixelRatio}px ${getComputedStyle(this.grid).fontFamily}`;
      ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
      let free = -Infinity;
      for (const { job, attempt, place } of this.grid.restarts()) {
        const x = plot.valToPos(place, "x", true);
        if (x < bbox.left || x > bbox.left + bbox.width) continue;
        ctx.strokeStyle = ctx.fillStyle = this.grid.documents.length > 1 ? this.grid.colour(job) : this.grid.restartColour;
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
        if (x < free) continue;
        const label = String(attempt.number);
        ctx.fillText(label, x + 3 * devicePixelRatio, bbox.top + 11 * devicePixelRatio);
        free = x + ctx.measureText(label).width + 8 * devicePixelRatio;
      }
      ctx.restore();
    }

    select(plot) {
      if (plot.select.width < NEAR_PIXELS) return;
      const { left, width } = plot.select;
      const zoom = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
      plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      this.grid.setZoom(zoom);
    }

    // Values at the cursor; without one, the newest.
    show(index) {
      if (!this.plot) return;
      const places = this.plot.data[0], at = index ?? places.length - 1;
      const twofold = this.lines.some((line) => line.kind === "evaluation") && this.lines.some((line) => line.kind === "line");
      const parts = [];
      for (const [i, line] of this.lines.entries()) {
        if (line.kind !== "line" && line.kind !== "evaluation") continue;
        const value = nearest(this.plot.data[i + 1], at);
        if (value === null) continue;
        const colour = ((line.colour ?? line.job) % COLOURS) + 1, evaluates = line.kind === "evaluation";
        const whose = line.label ?? (evaluates ? "evaluation" : twofold ? "training" : "");
        parts.push(el("span", { class: `curve-value chart-colour-${colour}` },
          ...(twofold ? [el("span", { class: evaluates ? "curve-mark curve-mark-evaluation" : "curve-mark", "aria-hidden": "true" })] : []),
          ...(whose ? [el("span", { class: "curve-whose" }, `${whose} `)] : []), formatValue(this.name, value)));
      }
      if (index !== null && index !== undefined) {
        parts.unshift(el("span", {}, `${AXES[this.grid.axis].toLowerCase()} ${formatPlace(this.grid.axis, places[at])}`));
        const restart = this.restartNear(places[at]);
        if (restart) parts.push(el("span", { class: "curve-restart" }, restart));
      }
      this.readout.replaceChildren(...parts.flatMap((part) => [part, " "]));
    }

    restartNear(place) {
      const x = this.plot.valToPos(place, "x");
      const near = this.grid.restarts().find((each) => Math.abs(this.plot.valToPos(each.place, "x") - x) < NEAR_PIXELS);
      if (!near) return "";
      const { attempt, before } = near;
      return `attempt ${attempt.number} from step ${whole.format(attempt.step)}${before?.cause ? ` after ${before.cause}` : ""}`;
    }

    press(event) {
      const places = this.plot?.data[0] ?? [];
      const at = this.plot?.cursor.idx ?? places.length - 1;
      const [low, high] = this.grid.zoom ?? [places[0], places[places.length - 1]];
      const step = event.shiftKey ? Math.max(1, Math.round(places.length / 20)) : 1;
      const zoom = (factor) => {
        const half = ((high - low) * factor) / 2, middle = places[at] ?? (low + high) / 2;
        this.grid.setZoom([Math.max(places[0], middle - half), middle + half]);
      };
      const actions = {
        ArrowLeft: () => this.move(at - step), ArrowRight: () => this.move(at + step), Home: () => this.move(0),
        End: () => this.move(places.length - 1), "+": () => zoom(0.5), "-": () => zoom(2),
        0: () => this.grid.setZoom(null), Escape: () => this.grid.setZoom(null),
      };
      if (!actions[event.key] || !places.length || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      actions[event.key]();
    }

    move(index) {
      const places = this.plot.data[0], at = Math.min(Math.max(index, 0), places.length - 1);
      this.plot.setCursor({ left: this.plot.valToPos(places[at], "x"), top: this.height / 3 });
      this.show(at);
    }

    summary() {
      const told = this.lines.flatMap((line, i) => {
        const values = this.plot.data[i + 1].filter((value) => value !== null && value !== undefined);
        if (!values.length || (line.kind !== "line" && line.kind !== "evaluation")) return [];
        const least = values.reduce((a, b) => Math.min(a, b)), format = (value) => formatValue(this.name, value);
        const kind = line.label ?? (line.kind === "evaluation" ? "evaluation" : "");
        const what = `${this.grid.sources[line.job].name}${kind ? `, ${kind}` : ""}`;
        return [`${what}: from ${format(values[0])} to ${format(values[values.length - 1])}, least ${format(least)}`];
      });
      return `${this.title}. ${told.join(". ")}. Arrow keys read values, plus and minus zoom, 0 shows all.`;
    }

    remove() {
      this.plot?.destroy();
      this.figure.remove();
    }
  }

  // -- the grid --------------------------------------------------------------------------------------------------------

  // What the reader chose of charts, for every job's page of this browser: those of the same metric look alike.
  class Choice {
    constructor(first) {
      this.first = first; // the chart that is large until somebody chooses
      try { this.kept = JSON.parse(localStorage.getItem(STORED)) ?? {}; } catch { this.kept = {}; }
    }

    list(name, otherwise = []) {
      const kept = this.kept?.[name];
      return Array.isArray(kept) ? kept.filter((each) => typeof each === "string") : otherwise;
    }

    keep(name, names) {
      this.kept = { ...this.kept, [name]: names };
      try { localStorage.setItem(STORED, JSON.stringify(this.kept)); } catch { /* a browser that keeps nothing */ }
    }

    toggle(list, name, names) {
      this.keep(list, names.includes(name) ? names.filter((each) => each !== name) : [...names, name]);
    }

    pinned(name) { return this.list("pinned").includes(name); }

    pin(name) { this.toggle("pinned", name, this.list("pinned")); }

    large(name) { return this.list("large", this.first).includes(name); }

    enlarge(name) { this.toggle("large", name, this.list("large", this.first)); }

    // Those pinned first, then by the reader's order; what has no place in it stays where it would be.
    sorted(names) {
      const order = this.list("order"), place = (name) => (order.includes(name) ? order.indexOf(name) : names.indexOf(name));
      return [...names].sort((a, b) => this.pinned(b) - this.pinned(a) || place(a) - place(b));
    }
  }

  let grids = 0;

  class JobCurves extends HTMLElement {
    connectedCallback() {
      if (this.sources) return;
      const given = this.querySelector('script[type="application/json"]');
      this.sources = JSON.parse(given?.textContent || "[]");
      this.key = `curves-${(grids += 1)}`;
      this.axis = "step";
      this.smoothing = 0;
      this.log = false;
      this.zoom = null;
      this.hiddenJobs = new Set();
      this.choice = new Choice(this.dataset.large ? [this.dataset.large] : []);
      this.charts = new Map();
      this.documents = this.sources.map((source) => source.curves ?? null);
      this.build();
      this.resizing = new ResizeObserver(() => this.charts.forEach((chart) => chart.resize()));
      this.resizing.observe(this.grid);
      this.scheme = matchMedia("(prefers-color-scheme: dark)");
      this.repaint = () => { this.forget(); this.draw(); };
      this.scheme.addEventListener("change", this.repaint);
      this.themes = new MutationObserver(this.repaint);
      this.themes.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme", "class"] });
      this.draw();
      if (this.documents.some((curves, i) => !curves && this.sources[i].src)) this.load();
      else this.schedule();
    }

    disconnectedCallback() {
      clearTimeout(this.timer);
      this.resizing?.disconnect();
      this.themes?.disconnect();
      this.scheme?.removeEventListener("change", this.repaint);
      this.forget();
      this.asked = -1;
    }

    build() {
      const axes = Object.entries(AXES).map(([axis, title]) => el("label", {},
        el("input", { type: "radio", name: `${this.key}-axis`, value: axis, ...(axis === "step" ? { checked: "" } : {}),
          onchange: () => this.setAxis(axis) }), title));
      const smoothing = el("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0",
        oninput: (event) => { this.smoothing = Number(event.target.value); this.draw(); } });
      const log = el("input", { type: "checkbox",
        onchange: (event) => { this.log = event.target.checked; this.draw(); } });
      this.whole = el("button", { type: "button", hidden: "", onclick: () => this.setZoom(null) }, "Show all");
      this.state = el("p", { class: "curve-state", role: "status" });
      this.grid = el("div", { class: "curve-grid" });
      this.gap = el("p", { class: "curve-gap" });
      this.table = el("details", { class: "curve-table", ontoggle: () => this.fillTable() },
        el("summary", {}, "Values as a table"));
      this.replaceChildren(
        el("div", { class: "curve-tools" },
          el("fieldset", {}, el("legend", {}, "Over"), ...axes),
          el("label", {}, "Smoothing", smoothing), el("label", {}, log, "Logarithmic"), this.whole),
        (this.names = el("div", {}, ...this.legend())), this.state, this.grid, this.gap, this.table);
    }

    // Other jobs in the place of these; how they are looked at stays.
    choose(sources) {
      this.sources = sources;
      this.documents = sources.map((source) => source.curves ?? null);
      this.hiddenJobs.clear();
      this.names.replaceChildren(...this.legend());
      this.draw();
    }

    legend() {
      if (this.sources.length < 2) return [];
      const toggle = (job) => (event) => {
        const hides = !this.hiddenJobs.delete(job);
        if (hides) this.hiddenJobs.add(job);
        event.currentTarget.setAttribute("aria-pressed", String(!hides));
        this.draw();
      };
      const buttons = this.sources.map((source, job) => el("button",
        { type: "button", "aria-pressed": "true", onclick: toggle(job) },
        el("span", { class: `curve-swatch chart-fill-${(job % COLOURS) + 1}`, "aria-hidden": "true" }), source.name));
      return [el("div", { class: "curve-legend", role: "group", "aria-label": "Jobs shown" }, ...buttons)];
    }

    colour(job) {
      return getComputedStyle(this).getPropertyValue(`--chart-${(job % COLOURS) + 1}`).trim() || "#0072b2";
    }

    get restartColour() {
      return getComputedStyle(this).getPropertyValue("--chart-restart").trim() || "#8a5a00";
    }

    restarts() {
      return this.documents.flatMap((curves, job) => (this.hiddenJobs.has(job) ? [] : curves?.attempts ?? [])
        .map((attempt, i, all) => ({ job, attempt, before: all[i - 1], place: attempt[this.axis] }))
        .filter(({ attempt, place }) => attempt.number > 1 && place !== null));
    }

    move(name, by) {
      const names = [...this.charts.keys()].sort((a, b) => this.order.indexOf(a) - this.order.indexOf(b));
      const at = names.indexOf(name), to = at + by;
      if (to < 0 || to >= names.length) return;
      [names[at], names[to]] = [names[to], names[at]];
      this.choice.keep("order", names);
    }

    setAxis(axis) {
      this.axis = axis;
      this.setZoom(null);
    }

    setZoom(zoom) {
      this.zoom = zoom;
      this.whole.hidden = zoom === null;
      this.draw();
      if (this.sources.some((source) => source.src)) {
        clearTimeout(this.timer);
        this.timer = setTimeout(() => this.load(), DETAIL_MILLISECONDS);
      }
    }

    async load() {
      const query = new URLSearchParams({ points: String(POINTS), axis: this.axis });
      if (this.zoom) {
        query.set("from", String(this.zoom[0]));
        query.set("to", String(this.zoom[1]));
      }
      const asked = (this.asked = (this.asked ?? 0) + 1);
      try {
        const found = await Promise.all(this.sources.map((source, i) =>
          (source.src ? ask(`${source.src}?${query}`) : this.documents[i])));
        if (asked !== this.asked) return;
        this.documents = found;
        const unread = found.reduce((sum, curves) => sum + (curves?.unread ?? 0), 0);
        this.tell(unread ? `Reading older records: ${formatBytes(unread)} to go` : "");
        this.draw();
        this.schedule(unread ? CATCH_UP_MILLISECONDS : null);
      } catch (error) {
        if (asked !== this.asked) return;
        this.tell(`${error.message} These curves are of ${new Date(this.drawnAt ?? Date.now()).toLocaleTimeString()}.`);
        this.schedule();
      }
    }

    schedule(milliseconds = null) {
      const live = Number(this.dataset.live || 0) * 1000;
      clearTimeout(this.timer);
      if (!milliseconds && !live) return;
      const next = () => (document.visibilityState === "hidden" ? this.schedule(milliseconds) : this.load());
      this.timer = setTimeout(next, milliseconds ?? live);
    }

    tell(words) {
      if (this.state.textContent !== words) this.state.textContent = words;
    }

    draw() {
      const known = this.documents.filter(Boolean);
      const names = new Set([...Object.keys(TITLES), ...known.flatMap((curves) =>
        [...Object.keys(curves.series), ...Object.keys(curves.evaluations.series)])]);
      const told = [...names].filter((name) => !isRank(name) &&
        known.some((curves) => curves.series[name] || curves.evaluations.series[name]));
      // Of one job alone: ranks of several would be told apart by nothing.
      if (this.documents.length === 1 && known.length && ranksOf(known[0]).length) told.splice(rankPlace(told), 0, RANKS);
      for (const [name, chart] of this.charts) {
        if (told.includes(name)) continue;
        chart.remove();
        this.charts.delete(name);
      }
      this.order = this.choice.sorted(told);
      for (const [i, name] of this.order.entries()) {
        if (!this.charts.has(name)) this.charts.set(name, new Chart(this, name));
        const { figure } = this.charts.get(name);
        // Only where it is not there yet: what is moved loses the focus.
        if (this.grid.children[i] !== figure) this.grid.insertBefore(figure, this.grid.children[i] ?? null);
        this.charts.get(name).draw();
      }
      if (known.length && !told.length) this.tell("No step is done yet.");
      const { gap = "", gapSeries } = this.dataset; // what to do where a series is not recorded
      this.gap.textContent = told.length && !told.includes(gapSeries) ? gap : "";
      if (known.length) this.drawnAt = Date.now();
      this.fillTable();
    }

    forget() {
      this.charts.forEach((chart) => chart.remove());
      this.charts.clear();
    }

    fillTable() {
      if (!this.table.open) return;
      const tables = this.documents.flatMap((curves, job) => (curves ? [valueTable(this.sources[job].name, curves)] : []));
      this.table.replaceChildren(this.table.firstElementChild, ...tables);
    }
  }

  async function ask(address) {
    let reply;
    try {
      reply = await fetch(address, { headers: { accept: "application/json" }, credentials: "same-origin" });
    } catch {
      throw new Error("The server does not answer.");
    }
    if (reply.status === 401 || reply.redirected) throw new Error("The session has ended: sign in again in another tab.");
    if (!reply.ok) throw new Error(`The server answered with status ${reply.status}.`);
    return reply.json();
  }

  customElements.define("job-curves", JobCurves);
})();
