// What the values of curves look like: numbers in words, smoothing, and the table beside a chart. For charts.js.
globalThis.curveValues = (() => {
  "use strict";

  const TITLES = {
    loss: "Loss", evaluationLoss: "Evaluation loss", gradNorm: "Gradient norm", lr: "Learning rate", tokensPerSecond: "Tokens per second",
    mfu: "MFU", memoryBytes: "Memory", stepSeconds: "Step time", dataWaitSeconds: "Wait for data",
    "hardware.gpuUse": "GPU use of rank 0", "hardware.gpuMemoryBytes": "GPU memory in use, rank 0", "hardware.gpuWatts": "GPU power, rank 0",
    "hardware.cpuCores": "Processor cores in use, rank 0", "hardware.processMemoryBytes": "Memory of the process, rank 0",
    "hardware.networkReceivedBytes": "Network in a second, received", "hardware.networkSentBytes": "Network in a second, sent",
  };
  const RANKS = "rankSeconds"; // the chart of all ranks' own work, whose series are rankSeconds.0, rankSeconds.1 …
  const AXES = { step: "Steps", tokens: "Tokens", seconds: "Time" };
  const TABLE_ROWS = 25;

  function el(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  }

  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 });
  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

  function formatDuration(seconds) {
    const parts = [[86400, "d"], [3600, "h"], [60, "m"], [1, "s"]];
    const rounded = Math.round(Math.abs(seconds));
    const first = parts.findIndex(([unit]) => rounded >= unit);
    if (first < 0) return "0s";
    const [unit, name] = parts[first], [next, nextName] = parts[first + 1] ?? [0, ""];
    const rest = next ? Math.floor((rounded % unit) / next) : 0;
    return `${seconds < 0 ? "−" : ""}${Math.floor(rounded / unit)}${name}${rest ? ` ${rest}${nextName}` : ""}`;
  }

  function formatBytes(count) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    const at = Math.min(units.length - 1, Math.floor(Math.log2(Math.max(1, Math.abs(count))) / 10));
    return `${Number((count / 1024 ** at).toPrecision(3))} ${units[at]}`;
  }

  // 17 µs, 3.2 ms, 1.5 s, by the size of `like`: the labels of an axis share a unit.
  function formatSeconds(value, like = value) {
    const [unit, name] = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]].find(([each]) => Math.abs(like) >= each) ?? [1e-9, "ns"];
    return value === 0 ? "0" : `${Number((value / unit).toPrecision(3))} ${name}`;
  }

  function formatValue(name, value) {
    if (value === null || value === undefined) return "–";
    if (isShare(name)) return `${(100 * value).toFixed(1)}%`;
    if (isBytes(name)) return formatBytes(value);
    if (name === "hardware.gpuWatts") return `${Number(value.toPrecision(3))} W`;
    if (isSeconds(name)) return formatSeconds(value);
    if (value !== 0 && (Math.abs(value) < 0.001 || Math.abs(value) >= 10000)) {
      return Math.abs(value) < 0.001 ? value.toExponential(1) : compact.format(value);
    }
    return String(Number(value.toPrecision(4)));
  }

  // Labels of an axis: all in one unit and of one notation, with as many digits as tell them apart.
  function formatTicks(name, ticks, log) {
    const given = ticks.filter((value) => value !== null && value !== undefined);
    if (log || given.length < 2) return ticks.map((value) => (value === null ? "" : formatValue(name, value)));
    const most = given.reduce((a, b) => Math.max(a, Math.abs(b)), 0), step = Math.abs(given[1] - given[0]);
    const digits = (scale) => Math.min(8, Math.max(0, -Math.floor(Math.log10(step / scale) + 1e-9)));
    const say = (value) => {
      if (isSeconds(name)) return formatSeconds(value, most);
      if (isShare(name)) return `${(100 * value).toFixed(digits(0.01))}%`;
      if (isBytes(name)) return formatBytes(value);
      if (value === 0 || most < 0.01) return value === 0 ? "0" : value.toExponential().replace(/(\.\d\d)\d+/, "$1");
      return most >= 10_000 ? compact.format(value) : value.toFixed(digits(1));
    };
    return ticks.map((value) => (value === null ? "" : say(value)));
  }

  function formatPlace(axis, value) {
    if (axis === "seconds") return formatDuration(value);
    return axis === "step" ? whole.format(value) : compact.format(value);
  }

  const titleOf = (name) => TITLES[name]
    ?? (isRank(name) ? `Own work of ${rankName(name)}` : name === RANKS ? "Step time by rank (own work)" : inWords(name.replace(/^values\./, "")));
  // bits_per_byte as people write it; names with other signs are left as they are.
  const inWords = (name) => (/^[a-z][a-z0-9_]*$/.test(name) ? `${name[0].toUpperCase()}${name.slice(1).replaceAll("_", " ")}` : name);
  const isSeconds = (name) => name === "stepSeconds" || name === "dataWaitSeconds" || name === RANKS || isRank(name);
  const isShare = (name) => name === "mfu" || name === "hardware.gpuUse";
  const isBytes = (name) => name === "memoryBytes" || /^hardware\..*Bytes$/.test(name);
  const isRank = (name) => name.startsWith(`${RANKS}.`);
  const rankName = (name) => name.slice(RANKS.length + 1).replace(/^\d+$/, "rank $&");

  // [name, series] of each rank that a job's curves tell of, in the order of their numbers.
  function ranksOf(curves) {
    const found = Object.entries(curves?.series ?? {}).filter(([name]) => isRank(name));
    return found.map(([name, series]) => [rankName(name), series]).sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
  }

  // Beside the time of the whole step.
  const rankPlace = (names) => (names.includes("stepSeconds") ? names.indexOf("stepSeconds") + 1 : names.length);

  // Exponential moving mean without the pull of its first value; a hole stays one.
  function smoothed(values, weight) {
    let mean = 0, known = 0;
    return values.map((value) => {
      if (value === null) return null;
      mean = mean * weight + value * (1 - weight);
      known = known * weight + (1 - weight);
      return mean / known;
    });
  }

  // What a chart can join with others: places that rise, and nothing below zero on a logarithmic scale.
  function drawable(places, columns, log) {
    const kept = places.map((place, i) => i).filter((i) => i === 0 || places[i] > places[i - 1]);
    const pick = (column) => kept.map((i) => (log && !(column[i] > 0) ? null : column[i]));
    return [kept.map((i) => places[i]), ...columns.map(pick)];
  }

  function faint(colour, share) {
    const alpha = Math.round(255 * share).toString(16).padStart(2, "0");
    return /^#[0-9a-f]{6}$/i.test(colour) ? `${colour}${alpha}` : colour;
  }

  // The value there, else the one before it: lines of several jobs have their points at different places.
  function nearest(values, index) {
    for (let i = index; i >= 0; i -= 1) if (values[i] !== null && values[i] !== undefined) return values[i];
    return null;
  }

  function valueTable(title, curves) {
    const names = Object.keys(curves.series), places = curves.axes.step;
    const every = Math.max(1, Math.ceil(places.length / TABLE_ROWS));
    const rows = places.map((_, i) => i).filter((i) => i % every === 0 || i === places.length - 1);
    const head = [...Object.values(AXES), ...names.map(titleOf)].map((name) => el("th", { scope: "col" }, name));
    const body = rows.map((i) => el("tr", {},
      ...Object.keys(AXES).map((axis) => el("td", {}, formatPlace(axis, curves.axes[axis][i]))),
      ...names.map((name) => el("td", {}, formatValue(name, curves.series[name].mean[i])))));
    const table = el("table", {}, el("caption", {}, title), el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body));
    return el("div", { class: "curve-scroll", tabindex: "0", role: "region", "aria-label": `Values of ${title}` }, table);
  }

  return { TITLES, AXES, compact, whole, el, formatBytes, formatValue, formatTicks, formatPlace, titleOf, smoothed, drawable, faint, nearest, valueTable, RANKS, isRank, isBytes, ranksOf, rankPlace };
})();
