"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const facts = JSON.parse(byId("facts").textContent);
  const { buffer, ring, details, keys, sampler } = facts;
  const list = facts.episodes;
  const bytesOf = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const unpacked = async (text) => {
    const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).arrayBuffer();
  };
  const KINDS = { i4: Int32Array, f4: Float32Array, u1: Uint8Array, f8: Float64Array };
  let numbers;
  const array = (fact) => (fact ? new KINDS[fact.t](numbers, fact.at, fact.n) : null);

  // ---------------------------------------------------------------- words and colours
  const whole = (value) => Math.round(value).toLocaleString("en-US");
  const short = (value) => {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    if (Number.isInteger(value) && Math.abs(value) < 1e15) return whole(value);
    const size = Math.abs(value);
    return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : value.toPrecision(4).replace(/\.?0+$/, "");
  };
  const VIRIDIS = ["#440154", "#472c7a", "#3b518b", "#2c718e", "#21908d", "#27ad81", "#5cc863", "#aadc32", "#fde725"];
  const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const scale = Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * (VIRIDIS.length - 1), low = Math.min(Math.floor(at), VIRIDIS.length - 2);
    const [from, to] = [rgb(VIRIDIS[low]), rgb(VIRIDIS[low + 1])];
    return `rgb(${from.map((c, k) => Math.round(c + (to[k] - c) * (at - low))).join(",")})`;
  });
  const OF_END = { terminated: "#c2504a", truncated: "#d99a2b", done: "#4878b0", open: "#3f9a6b", cut: "#8d8d89", padding: "#cfcfca" };
  const LINES = ["#3f83cc", "#c2504a", "#3f9a6b", "#d99a2b", "#7b5aa6", "#2a9aa8", "#8a6d4b", "#c46aa0"];
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "text") element.textContent = value;
      else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children);
    return element;
  };

  // ---------------------------------------------------------------- the list of episodes
  const COLUMNS = [
    { name: "episode", of: "number", title: "#" }, { name: "return", of: "return" }, { name: "length", of: "length" },
    { name: "end", of: "end" }, { name: "lane", of: "lane" }, { name: "age", of: "age" },
    { name: "priority", of: "priority" }, { name: "drawn", of: "probability", title: "drawn %" },
  ];
  let columns = [], episodes = [], shown = [], sorted = { name: "episode", up: true }, limit = 200, chosen = null;
  const detailed = new Map(details.map((each) => [each.number, each]));

  const readList = () => {
    if (!list.count) return;
    const data = Object.fromEntries(COLUMNS.map((column) => [column.of, array(list[column.of])]));
    data.first = array(list.first);
    columns = COLUMNS.filter((c) => data[c.of] && !(c.name === "lane" && buffer.lanes === 1));
    episodes = Array.from(data.number, (number, i) => ({
      episode: number, return: data.return ? data.return[i] : null, length: data.length[i],
      end: list.kinds_of_ends[data.end[i]], lane: data.lane[i], age: data.age[i], first: data.first[i],
      priority: data.priority ? data.priority[i] : null, drawn: data.probability ? data.probability[i] * 100 : null,
    }));
  };
  const TERM = /^(\w+)\s*(<=|>=|!=|<|>|=)\s*(\S+)$/;
  const COMPARE = {
    "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b,
    "=": (a, b) => a === b, "!=": (a, b) => a !== b,
  };
  const filterOf = (text) => {
    const wrong = [];
    const tests = text.split(/,|\band\b/).map((term) => term.trim()).filter(Boolean).map((term) => {
      const match = TERM.exec(term);
      if (match && columns.some((c) => c.name === match[1])) {
        const value = match[1] === "end" ? match[3] : Number(match[3]);
        if (match[1] === "end" || !Number.isNaN(value)) return (each) => COMPARE[match[2]](each[match[1]], value);
      }
      if (/^\d+$/.test(term)) return (each) => each.episode === Number(term);
      if (/^[a-z]+$/i.test(term) && !columns.some((c) => c.name === term)) return (each) => each.end.startsWith(term.toLowerCase());
      wrong.push(term);
      return () => true;
    });
    return { test: (each) => tests.every((t) => t(each)), wrong };
  };
  const apply = () => {
    const { test, wrong } = filterOf(byId("filter").value);
    shown = episodes.filter(test);
    const { name, up } = sorted;
    const order = (a, b) => (a[name] < b[name] ? -1 : a[name] > b[name] ? 1 : a.episode - b.episode);
    shown.sort((a, b) => (up ? order(a, b) : -order(a, b)));
    const of = list.count > episodes.length ? ` (${whole(episodes.length)} of ${whole(list.count)} are listed)` : "";
    byId("count").textContent = `${whole(shown.length)} of ${whole(list.count)} episodes${of}` + (wrong.length ? ` – not understood: ${wrong.join(", ")}` : "");
    limit = 200;
    fillRows();
    fillColumns();
  };
  const fillColumns = () => {
    byId("columns").replaceChildren(...columns.map((column) => {
      const active = sorted.name === column.name;
      const button = make("button", { type: "button", text: (column.title || column.name) + (active ? (sorted.up ? " ↑" : " ↓") : ""), "aria-label": `Sort by ${column.name}` });
      button.onclick = () => {
        sorted = { name: column.name, up: active ? !sorted.up : column.name === "episode" };
        apply();
        byId("columns").children[columns.indexOf(column)].firstChild.focus();
      };
      return make("th", { scope: "col", "aria-sort": active ? (sorted.up ? "ascending" : "descending") : "none", class: column.name === "end" ? "left" : null }, button);
    }));
  };
  const fillRows = () => {
    byId("rows").replaceChildren(...shown.slice(0, limit).map((each, place) => {
      const is = chosen === each.episode;
      const row = make("tr", { tabindex: is || (chosen === null && place === 0) ? 0 : -1, "aria-selected": String(is), "data-episode": each.episode });
      for (const column of columns) {
        const cell = make("td", { class: column.name === "end" ? "left" : null });
        if (column.name === "end") cell.append(make("span", { class: "end", style: `--of-end:${OF_END[each.end]}`, text: each.end }));
        else if (column.name === "episode") {
          cell.append(whole(each.episode));
          if (!detailed.has(each.episode)) cell.style.color = "var(--soft)";
        } else cell.textContent = short(each[column.name]);
        row.append(cell);
      }
      return row;
    }));
    byId("more").hidden = shown.length <= limit;
  };
  const choose = (number, focus) => {
    chosen = number;
    for (const row of byId("rows").children) {
      const is = Number(row.dataset.episode) === number;
      row.setAttribute("aria-selected", String(is));
      row.tabIndex = is ? 0 : -1;
      if (!is) continue;
      if (focus) row.focus({ preventScroll: true });
      const box = byId("list"), above = row.offsetTop - 28, below = row.offsetTop + row.offsetHeight;
      if (above < box.scrollTop) box.scrollTop = above;
      else if (below > box.scrollTop + box.clientHeight) box.scrollTop = below - box.clientHeight;
    }
    drawRing();
    showDetail();
  };
  byId("rows").addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (row) choose(Number(row.dataset.episode), true);
  });
  byId("rows").addEventListener("keydown", (event) => {
    const row = event.target.closest("tr");
    const to = event.key === "ArrowDown" ? row.nextElementSibling : event.key === "ArrowUp" ? row.previousElementSibling : null;
    if (event.key === "Enter" || event.key === " ") choose(Number(row.dataset.episode), true);
    else if (to) choose(Number(to.dataset.episode), true);
    else return;
    event.preventDefault();
  });
  byId("more").onclick = () => { limit += 1000; fillRows(); };
  byId("filter").addEventListener("input", apply);

  // ---------------------------------------------------------------- one episode
  let step = 0, images = null, urls = new Map(), plots = [], plotly = null;
  const library = () => {
    plotly ??= unpacked(byId("plotly").textContent).then((code) => {
      const script = make("script");
      script.textContent = new TextDecoder().decode(code);
      document.head.append(script);
      return window.Plotly;
    });
    return plotly;
  };
  const urlOf = (file) => {
    images ??= bytesOf(byId("images").textContent);
    if (!urls.has(file.at)) urls.set(file.at, URL.createObjectURL(new Blob([images.slice(file.at, file.at + file.n)], { type: "image/png" })));
    return urls.get(file.at);
  };
  const nearest = (steps, at) => {
    let best = 0;
    for (let i = 1; i < steps.length; i++) if (Math.abs(steps[i] - at) <= Math.abs(steps[best] - at)) best = i;
    return best;
  };
  const layout = () => ({
    margin: { l: 44, r: 6, t: 4, b: 20 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
    font: { size: 10, color: css("--soft"), family: "system-ui, sans-serif" }, hovermode: "x unified",
    hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--rule"), font: { color: css("--ink") } },
    xaxis: { gridcolor: css("--grid"), zeroline: false, linecolor: css("--rule") },
    yaxis: { gridcolor: css("--grid"), zerolinecolor: css("--rule"), nticks: 5 },
    shapes: [{ type: "line", x0: step, x1: step, yref: "paper", y0: 0, y1: 1, line: { color: css("--mark"), width: 1 } }],
  });
  const showDetail = async () => {
    const place = byId("detail");
    for (const url of urls.values()) URL.revokeObjectURL(url);
    urls = new Map();
    plots = [];
    const each = episodes.find((e) => e.episode === chosen);
    if (!each) {
      place.replaceChildren(make("p", { text: list.count ? "Choose an episode in the list or in the ring." : `No episodes: ${list.missing}` }));
      return;
    }
    const words = [`${whole(each.length)} rows`, each.return === null ? null : `return ${short(each.return)}`, each.end, `from row ${whole(each.first)}`,
      buffer.lanes > 1 ? `lane ${each.lane}` : null, `last row ${whole(each.age)} writes ago`].filter(Boolean);
    place.replaceChildren(make("header", {}, make("h3", { text: `Episode ${whole(each.episode)}` }), make("p", { text: words.join(" · ") })));
    const detail = detailed.get(chosen);
    if (!detail) {
      place.append(make("p", { text: `The rows of this episode were left out to keep the page small: make one with include=[${each.episode}].` }));
      return;
    }
    step = 0;
    const slider = make("input", { type: "range", id: "step", min: 0, max: detail.length - 1, value: 0, "aria-label": "Step of the episode" });
    slider.addEventListener("input", () => goTo(Number(slider.value)));
    place.append(make("div", { class: "steps" }, make("span", { text: "step" }), slider, make("output", { id: "at", for: "step" }), make("span", { text: "← →" })));
    for (const [name, files] of Object.entries(detail.images || {})) {
      const strip = make("div", { class: "strip", role: "group", "aria-label": `Images of ${name}` });
      const steps = array(detail.image_steps);
      files.forEach((file, i) => {
        const image = make("img", { src: urlOf(file), alt: `${name}, step ${steps[i]}` });
        image.onclick = () => goTo(steps[i]);
        strip.append(image);
      });
      place.append(make("h4", { text: name }), make("div", { class: "film", "data-key": name }, make("img", { class: "now", alt: "" }), strip));
    }
    for (const name of Object.keys(detail.texts || {})) place.append(make("h4", { text: name }), make("p", { class: "text", "data-text": name }));
    const grid = make("div", { class: "plots" });
    place.append(grid);
    goTo(0);
    const names = Object.entries(detail.curves);
    if (!names.length) return;
    const of = chosen, Plotly = await library();
    if (of !== chosen || !grid.isConnected) return;
    const x = Array.from(array(detail.steps));
    const constant = [];
    for (const [name, fact] of names) {
      const values = array(fact), count = fact.shape[0], entry = keys.find((k) => k.name === name);
      const all = entry.shape.reduce((a, b) => a * b, 1);
      if (count === 1 && x.length > 1 && values.every((value) => value === values[0])) { constant.push(`${name} = ${short(values[0])}`); continue; }
      const note = all > count ? ` first ${count} of ${all}` : all > 1 ? ` ${count} curves` : "";
      const target = make("div", { role: "img", "aria-label": `Curve of ${name} over the steps of episode ${each.episode}` });
      grid.append(make("div", { class: "plot", "data-curve": name }, make("h4", { text: name }, make("small", { text: note })), target));
      const lines = Array.from({ length: count }, (_, i) => ({
        x, y: Array.from(values.subarray(i * x.length, (i + 1) * x.length)), mode: "lines", name: all > 1 ? `[${i}]` : name,
        line: { width: 1.25, color: LINES[i % LINES.length], shape: entry.kind === "flag" ? "hv" : "linear" }, hovertemplate: "%{y:.4~g}",
      }));
      Plotly.newPlot(target, lines, layout(), { displayModeBar: false, responsive: true });
      plots.push(target);
    }
    byId("js-plotly-tester")?.setAttribute("aria-hidden", "true"); // Plotly measures text in it, out of sight
    if (constant.length) place.append(make("p", { class: "note", text: `The same in all its rows: ${constant.join(", ")}` }));
    document.body.dataset.plots = String(plots.length);
  };
  const goTo = (to) => {
    const detail = detailed.get(chosen);
    if (!detail) return;
    step = Math.max(0, Math.min(detail.length - 1, to));
    byId("step").value = step;
    byId("step").setAttribute("aria-valuetext", `step ${step} of ${detail.length}`);
    byId("at").textContent = `${whole(step)} / ${whole(detail.length - 1)}`;
    if (detail.images) {
      const steps = array(detail.image_steps), at = nearest(steps, step);
      for (const film of document.querySelectorAll(".film")) {
        const strip = film.querySelector(".strip");
        [...strip.children].forEach((image, i) => image.classList.toggle("on", i === at));
        const now = strip.children[at], large = film.querySelector(".now");
        large.src = now.src;
        large.alt = `${film.dataset.key}, step ${steps[at]}`;
        strip.scrollLeft = now.offsetLeft - strip.offsetLeft - strip.clientWidth / 2 + now.clientWidth / 2;
      }
    }
    if (detail.texts) {
      const at = nearest(array(detail.text_steps), step);
      for (const place of document.querySelectorAll("[data-text]")) place.textContent = detail.texts[place.dataset.text][at];
    }
    for (const plot of plots) window.Plotly.relayout(plot, { "shapes[0].x0": step, "shapes[0].x1": step });
  };
  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches("input:not([type=range]), select, textarea") || event.ctrlKey || event.metaKey || event.altKey;
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (typing || by === undefined || !detailed.has(chosen)) return;
    goTo(by === -Infinity ? 0 : by === Infinity ? detailed.get(chosen).length - 1 : step + by * (event.shiftKey ? 10 : 1));
    event.preventDefault();
  });

  // ---------------------------------------------------------------- the ring
  const canvas = byId("ring");
  let colour = null, cells = {}, picture = null;
  const CHOICES = [["return", "return"], ["end", "end"], ["length", "length"], ["age", "age"], ["priority", "priority"], ["drawn", "draw probability"]];
  const valuesOf = (name) => {
    if (name === "age") return cells.age;
    if (name === "priority") return cells.priority;
    if (name === "drawn") return cells.probability;
    return Float64Array.from(cells.episode, (n) => { const e = cells.known.get(n); return e && e[name] !== null ? e[name] : NaN; });
  };
  const range = (values) => {
    const sortedValues = Float64Array.from(values).filter((v) => !Number.isNaN(v)).sort();
    if (!sortedValues.length) return [0, 1];
    const at = (q) => sortedValues[Math.round(q * (sortedValues.length - 1))];
    return [at(0.01), at(0.99)];
  };
  const readRing = () => {
    if (!ring.filled) return;
    for (const name of ["episode", "age", "priority", "probability", "lanes"]) cells[name] = array(ring[name]);
    cells.known = new Map(episodes.map((e) => [e.episode, e]));
    const available = CHOICES.filter(([name]) => (name === "age") || (name === "priority" ? cells.priority : name === "drawn" ? cells.probability : columns.some((c) => c.name === name)));
    for (const [name, title] of available) {
      const input = make("input", { type: "radio", name: "colour", value: name });
      input.onchange = () => { colour = name; picture = null; drawRing(); };
      byId("colours").append(make("label", {}, input, title));
    }
    colour = available[0][0];
    byId("colours").querySelector("input").checked = true;
    const perCell = ring.filled / ring.cells_of_lane;
    const notes = [perCell > 1 ? `One cell is ${short(perCell)} rows.` : "One cell is one row."];
    if (cells.lanes.length > 1) notes.push(`One line is one lane${buffer.lanes > cells.lanes.length ? `; ${cells.lanes.length} of ${buffer.lanes} lanes are shown` : ""}.`);
    notes.push(`▼ cursor: row ${whole(buffer.cursor)} is written next.`);
    if (buffer.capacity === null || buffer.capacity > ring.filled) notes.push("Hatched: not written yet.");
    byId("ring-note").textContent = notes.join(" ");
    canvas.setAttribute("aria-label", `The ring: ${buffer.rows} rows are stored${buffer.capacity ? ` of ${buffer.capacity}` : ""}, the cursor is at row ${buffer.cursor}, ${list.count} episodes. Use the list of episodes to read them.`);
  };
  const geometry = () => {
    const wide = canvas.clientWidth, lanes = cells.lanes.length;
    const empty = Math.round((ring.rows - ring.filled) / ring.filled * ring.cells_of_lane);
    const all = ring.cells_of_lane + empty;
    const lines = lanes > 1 ? 1 : Math.max(1, Math.min(24, Math.round(Math.sqrt(all / 40))));
    const perLine = Math.ceil(all / lines), total = lanes > 1 ? lanes : lines;
    const tall = Math.max(6, Math.min(28, Math.floor(300 / total))), gap = total > 1 ? 3 : 0;
    return { wide, lanes, lines, perLine, all, total, tall, gap, top: 12, cell: wide / perLine, height: 12 + total * (tall + gap) + 2 };
  };
  const boxOf = (g, lane, cell) => {
    const line = g.lanes > 1 ? lane : Math.floor(cell / g.perLine), at = g.lanes > 1 ? cell : cell % g.perLine;
    return [at * g.cell, g.top + line * (g.tall + g.gap)];
  };
  const paint = (g) => {
    const ratio = window.devicePixelRatio || 1, off = document.createElement("canvas");
    off.width = Math.round(g.wide * ratio); off.height = Math.round(g.height * ratio);
    const c = off.getContext("2d");
    c.scale(ratio, ratio);
    const values = colour === "end" ? null : valuesOf(colour), [low, high] = values ? range(values) : [0, 1];
    const paper = css("--paper"), none = css("--rule");
    for (let lane = 0; lane < g.lanes; lane++) {
      for (let cell = 0; cell < ring.cells_of_lane; cell++) {
        const at = lane * ring.cells_of_lane + cell, [x, y] = boxOf(g, lane, cell);
        if (values) c.fillStyle = Number.isNaN(values[at]) ? none : scale[Math.max(0, Math.min(255, Math.round((values[at] - low) / (high - low || 1) * 255)))];
        else { const e = cells.known.get(cells.episode[at]); c.fillStyle = e ? OF_END[e.end] : none; }
        const begins = cell && cells.episode[at] !== cells.episode[at - 1];
        const inset = begins && g.cell >= 3 ? 1 : 0;
        c.fillRect(x + inset, y, g.cell + 0.6 - inset, g.tall);
        if (begins && g.cell < 3) { c.fillStyle = paper; c.fillRect(x, y, 0.6, g.tall); }
      }
      for (let cell = ring.cells_of_lane; cell < g.all; cell++) {
        const [x, y] = boxOf(g, lane, cell);
        c.fillStyle = paper; c.fillRect(x, y, g.cell + 0.6, g.tall);
        c.strokeStyle = none; c.lineWidth = 1;
        if (g.cell >= 5 || cell % Math.ceil(5 / g.cell) === 0) { c.beginPath(); c.moveTo(x, y + g.tall); c.lineTo(x + Math.min(5, Math.max(g.cell, 4)), y); c.stroke(); }
      }
    }
    const [from, to] = [byId("legend"), byId("legend").getContext("2d")];
    to.clearRect(0, 0, from.width, from.height);
    from.hidden = !values;
    if (values) for (let i = 0; i < 180; i++) { to.fillStyle = scale[Math.floor(i / 180 * 256)]; to.fillRect(i, 0, 1, 10); }
    byId("legend-text").replaceChildren(...(values ? [`${short(low)} – ${short(high)}`] : list.kinds_of_ends.flatMap((kind) => [make("span", { class: "end", style: `--of-end:${OF_END[kind]}`, text: kind }), "  "])));
    return off;
  };
  const drawRing = () => {
    if (!ring.filled) return;
    const g = geometry(), ratio = window.devicePixelRatio || 1;
    if (g.wide < 1) return; // the page is not laid out, or leaves
    if (!picture || picture.wide !== g.wide) picture = { wide: g.wide, image: paint(g) };
    canvas.width = Math.round(g.wide * ratio); canvas.height = Math.round(g.height * ratio);
    canvas.style.height = `${g.height}px`;
    const c = canvas.getContext("2d");
    c.drawImage(picture.image, 0, 0);
    c.scale(ratio, ratio);
    if (chosen !== null) {
      c.fillStyle = css("--ink");
      cells.episode.forEach((number, at) => {
        if (number !== chosen) return;
        const [x, y] = boxOf(g, Math.floor(at / ring.cells_of_lane), at % ring.cells_of_lane);
        c.fillRect(x, y - 2, g.cell + 0.6, 2); c.fillRect(x, y + g.tall, g.cell + 0.6, 2);
      });
    }
    const cell = Math.min(Math.floor(buffer.cursor / ring.filled * ring.cells_of_lane), g.all - 1), [x, y] = boxOf(g, 0, cell);
    const bottom = g.lanes > 1 ? g.height - 2 : y + g.tall;
    c.fillStyle = c.strokeStyle = css("--mark");
    c.lineWidth = 1.5;
    c.beginPath(); c.moveTo(x, y - 1); c.lineTo(x, bottom + 1); c.stroke();
    c.beginPath(); c.moveTo(x - 5, y - 9); c.lineTo(x + 5, y - 9); c.lineTo(x, y - 1); c.fill();
  };
  const cellAt = (event) => {
    const g = geometry(), box = canvas.getBoundingClientRect();
    const line = Math.floor((event.clientY - box.top - g.top) / (g.tall + g.gap)), column = Math.floor((event.clientX - box.left) / g.cell);
    if (line < 0 || line >= g.total || column < 0 || column >= g.perLine) return null;
    const lane = g.lanes > 1 ? line : 0, cell = g.lanes > 1 ? column : line * g.perLine + column;
    return cell < ring.cells_of_lane ? { lane, cell, at: lane * ring.cells_of_lane + cell } : null;
  };
  canvas.addEventListener("mousemove", (event) => {
    const tip = byId("tip"), place = ring.filled ? cellAt(event) : null;
    tip.hidden = !place;
    if (!place) return;
    const perCell = ring.filled / ring.cells_of_lane, from = Math.ceil(place.cell * perCell), to = Math.ceil((place.cell + 1) * perCell) - 1;
    const number = cells.episode[place.at], each = cells.known.get(number);
    const words = [from === to ? `row ${whole(from)}` : `rows ${whole(from)} to ${whole(to)}`];
    if (cells.lanes.length > 1) words.push(`lane ${cells.lanes[place.lane]}`);
    if (number >= 0) words.push(`episode ${whole(number)}`);
    if (each) words.push(`return ${short(each.return)}`, each.end);
    words.push(`age ${short(cells.age[place.at])}`);
    if (cells.priority) words.push(`priority ${short(cells.priority[place.at])}`);
    tip.textContent = words.join(" · ");
    tip.style.left = `${Math.min(event.clientX + 12, window.innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${event.clientY + 16}px`;
  });
  canvas.addEventListener("mouseleave", () => { byId("tip").hidden = true; });
  canvas.addEventListener("click", (event) => {
    const place = ring.filled ? cellAt(event) : null, number = place ? cells.episode[place.at] : -1;
    if (number >= 0 && cells.known.has(number)) choose(number, true);
  });

  // ---------------------------------------------------------------- entries and sampler
  const bars = (summary, label) => {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("class", "bars"); svg.setAttribute("role", "img"); svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-label", label);
    const counts = summary.counts, most = Math.max(...counts, 1);
    svg.setAttribute("viewBox", `0 0 ${Math.max(counts.length, 1)} 100`);
    counts.forEach((count, i) => {
      if (!count) return;
      const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect"), tall = Math.max(2, count / most * 100);
      for (const [name, value] of Object.entries({ x: i + 0.05, y: 100 - tall, width: 0.9, height: tall })) bar.setAttribute(name, value);
      svg.append(bar);
    });
    return svg;
  };
  const fillKeys = () => {
    const head = ["entry", "type", "shape", "distribution", "lowest", "mean", "highest", "sd", "NaN, inf"];
    const rows = keys.map((key) => {
      const s = key.summary, cells = [make("th", { class: "left", scope: "row", text: key.name }), make("td", { class: "left", text: key.dtype }), make("td", { class: "left", text: key.shape.length ? `[${key.shape.join(", ")}]` : "" })];
      if (!s) return make("tr", {}, ...cells, make("td", { colspan: 6, class: "left", text: "" }));
      const wrong = s.nan + s.infinite;
      return make("tr", {}, ...cells, make("td", { class: "left" }, bars(s, `Distribution of ${key.name}, from ${short(s.low)} to ${short(s.high)}`)),
        ...[s.low, s.mean, s.high, s.deviation].map((value) => make("td", { text: short(value) })),
        make("td", { class: wrong ? "warn" : null, text: wrong ? `${whole(s.nan)}, ${whole(s.infinite)}` : "0" }));
    });
    byId("keys").append(make("thead", {}, make("tr", {}, ...head.map((text, i) => make("th", { scope: "col", class: i < 4 ? "left" : null, text })))), make("tbody", {}, ...rows));
    const numeric = keys.filter((key) => key.rows), fewest = Math.min(...numeric.map((key) => key.rows));
    byId("keys-note").textContent = !numeric.length ? "" : fewest >= buffer.items ? "over all items" : `over ${whole(fewest)} or more of ${whole(buffer.items)} items, evenly chosen`;
  };
  const fillSampler = () => {
    const words = make("div", {}, make("h3", { text: sampler.name }));
    if (sampler.law) words.append(make("p", { text: sampler.law }));
    else words.append(make("p", { class: "note", text: "The probabilities of this sampler are not known to this page." }));
    words.append(make("code", { text: sampler.settings }));
    const facts = make("dl");
    const add = (name, value) => facts.append(make("dt", { text: name }), make("dd", {}, value));
    if (sampler.effective !== undefined) {
      add("effective number of items", `${whole(sampler.effective)} of ${whole(buffer.items)}`);
      add("share of the most likely 1 %", `${short(sampler.top_share * 100)} %`);
      add("items that are never drawn", sampler.never ? make("span", { class: "warn", text: whole(sampler.never) }) : "0");
      add("times the average", bars(sampler.relative, `How often items are drawn, from ${short(sampler.relative.low)} to ${short(sampler.relative.high)} times the average`));
      add("", `${short(sampler.relative.low)} to ${short(sampler.relative.high)}`);
    }
    for (const each of sampler.refused) add("not drawn", `${whole(each.items)} items${each.episodes === null ? "" : ` in ${whole(each.episodes)} episodes`}: ${each.reason}`);
    byId("sampler").append(make("div", { class: "sampler" }, words, facts));
  };

  // ---------------------------------------------------------------- begin
  const dark = (is) => { document.documentElement.classList.toggle("dark", is); picture = null; };
  const preferred = window.matchMedia("(prefers-color-scheme: dark)");
  dark(preferred.matches);
  byId("theme").onclick = () => {
    dark(!document.documentElement.classList.contains("dark"));
    drawRing();
    for (const plot of plots) window.Plotly.relayout(plot, layout());
  };
  (async () => {
    numbers = await unpacked(byId("numbers").textContent);
    readList();
    readRing();
    drawRing();
    if (list.count) apply();
    else byId("count").textContent = "none";
    fillKeys();
    fillSampler();
    document.body.dataset.drawn = String(Math.round(performance.now()));
    new ResizeObserver(() => { picture = null; drawRing(); }).observe(canvas.parentElement);
    const asked = Number(new URLSearchParams(location.hash.slice(1)).get("episode") ?? NaN);
    if (details.length) choose(cells.known.has(asked) ? asked : details[0].number, false);
    else showDetail();
  })();
})();
