(function () {
  "use strict";
  // Draws the timeline strips at any zoom. Without DecompressionStream, or with broken data, the page's own drawing stays.
  var holder = document.getElementById("strip-data");
  var root = document.getElementById("strips");
  if (!holder || !root || typeof DecompressionStream === "undefined") return;
  var data = JSON.parse(holder.textContent);
  var note = document.getElementById("strip-note");
  var axis = root.querySelector(".strip-axis");
  var view = { from: 0, to: data.span_ns };
  var sides = [];
  var wanted = "";

  function time(ns) {
    var size = Math.abs(ns);
    if (!ns) return "0";
    return size >= 999500 ? (ns / 1e6).toFixed(2) + " ms" : (ns / 1e3).toPrecision(3) + " µs";
  }

  // three planes: u32 since the start before, u32 duration, u16 name
  function unpack(side) {
    var packed = Uint8Array.from(atob(side.planes), function (char) { return char.charCodeAt(0); });
    var stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
    return new Response(stream).arrayBuffer().then(function (raw) {
      var count = raw.byteLength / 10;
      var since = new Uint32Array(raw, 0, count);
      var start = new Float64Array(count);
      for (var i = 0, at = 0; i < count; i += 1) { at += since[i]; start[i] = at; }
      return { start: start, duration: new Uint32Array(raw, 4 * count, count), name: new Uint16Array(raw, 8 * count, count) };
    });
  }

  function begin(box, side, planes) {
    var canvas = document.createElement("canvas");
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "application");
    canvas.setAttribute("aria-label", side.label + ": timeline of " + planes.start.length + " kernels");
    canvas.setAttribute("aria-describedby", "strip-note");
    box.appendChild(canvas);
    box.classList.add("drawn");
    var one = { canvas: canvas, side: side, planes: planes, chosen: -1, pinned: false };
    listen(one);
    sides.push(one);
  }

  function firstAfter(planes, ns) {
    var low = 0, high = planes.start.length;
    while (low < high) {
      var middle = (low + high) >> 1;
      if (planes.start[middle] < ns) low = middle + 1; else high = middle;
    }
    return low;
  }

  function draw(one) {
    var canvas = one.canvas, planes = one.planes, scale = window.devicePixelRatio || 1;
    var width = canvas.width = Math.max(1, Math.round(canvas.clientWidth * scale));
    var height = canvas.height = Math.max(1, Math.round(canvas.clientHeight * scale));
    var style = getComputedStyle(document.documentElement);
    var pen = canvas.getContext("2d");
    var per = width / (view.to - view.from);
    var end = Math.min(width, (one.side.end_ns - view.from) * per);
    pen.fillStyle = style.getPropertyValue("--soft");
    pen.fillRect(0, 0, end, height);
    pen.strokeStyle = style.getPropertyValue("--hatch");
    pen.lineWidth = scale;
    pen.save(); pen.beginPath(); pen.rect(0, 0, end, height); pen.clip(); pen.beginPath();
    for (var x = -height; x < end; x += 7 * scale) { pen.moveTo(x, height); pen.lineTo(x + height, 0); }
    pen.stroke(); pen.restore();

    // one box a kernel where it is wide enough, else each column's time by category
    var first = Math.max(0, firstAfter(planes, view.from) - 64), last = firstAfter(planes, view.to);
    var sums = new Map();
    for (var i = first; i < last; i += 1) {
      var left = (planes.start[i] - view.from) * per, wide = planes.duration[i] * per;
      if (left + wide < 0) continue;
      var category = one.side.kernels[planes.name[i]][1];
      if (wanted && one.side.kernels[planes.name[i]][0].toLowerCase().indexOf(wanted) === -1) continue;
      if (wide >= 2) {
        pen.fillStyle = data.colours[category];
        pen.fillRect(left, 0, Math.max(1, wide - (wide > 4 ? 1 : 0)), height);
        continue;
      }
      for (var column = Math.max(0, Math.floor(left)); column <= Math.min(width - 1, Math.floor(left + wide)); column += 1) {
        var inside = Math.min(left + wide, column + 1) - Math.max(left, column);
        var row = sums.get(category);
        if (!row) sums.set(category, row = new Float32Array(width));
        row[column] += Math.max(inside, 0);
      }
    }
    var floor = new Float32Array(width);
    sums.forEach(function (row, category) {
      pen.fillStyle = data.colours[category];
      for (var column = 0; column < width; column += 1) {
        if (!row[column]) continue;
        var tall = Math.min(row[column], 1 - floor[column]) * height;
        pen.fillRect(column, height - floor[column] * height - tall, 1, tall);
        floor[column] = Math.min(1, floor[column] + row[column]);
      }
    });
    if (one.chosen >= 0) {
      pen.strokeStyle = style.getPropertyValue("--fg");
      pen.lineWidth = 2 * scale;
      var at = (planes.start[one.chosen] - view.from) * per;
      pen.strokeRect(at - scale, scale, Math.max(2, planes.duration[one.chosen] * per) + 2 * scale, height - 2 * scale);
    }
  }

  // kernels whose name holds the words stay, the others leave the strip; counts and times of each side
  var search = document.getElementById("strip-search"), found = document.getElementById("strip-found");
  if (search) search.addEventListener("input", function () {
    wanted = search.value.trim().toLowerCase();
    found.textContent = !wanted ? "" : sides.map(function (one) {
      var count = 0, ns = 0;
      one.planes.name.forEach(function (name, at) {
        if (one.side.kernels[name][0].toLowerCase().indexOf(wanted) !== -1) { count += 1; ns += one.planes.duration[at]; }
      });
      return one.side.label + ": " + count + (count === 1 ? " kernel, " : " kernels, ") + time(ns);
    }).join("; ");
    redraw();
  });

  // modules by level: moved with the zoom, named where there is room
  function placeModules() {
    root.querySelectorAll(".lanes").forEach(function (svg) {
      var wide = svg.clientWidth, span = view.to - view.from;
      svg.querySelectorAll("g").forEach(function (group) {
        var left = (Number(group.dataset.from) - view.from) / span * wide, right = (Number(group.dataset.to) - view.from) / span * wide;
        var box = group.querySelector("rect"), label = group.querySelector("text"), name = group.dataset.name;
        var start = Math.max(left, 0), end = Math.min(right, wide);
        group.setAttribute("visibility", end > 0 && start < wide ? "visible" : "hidden");
        box.setAttribute("x", String(left));
        box.setAttribute("width", String(Math.max(right - left, 1)));
        label.setAttribute("x", String(start + 4));
        label.textContent = end - start > 8 + 7.5 * name.length ? name : "";
      });
    });
  }

  function redraw() {
    sides.forEach(draw);
    placeModules();
    if (!axis) return;
    var marks = axis.querySelectorAll("text");
    marks.forEach(function (mark, at) {
      var part = marks.length > 1 ? at / (marks.length - 1) : 0;
      mark.setAttribute("x", String(960 * part));
      mark.setAttribute("text-anchor", at === 0 ? "start" : at === marks.length - 1 ? "end" : "middle");
      mark.textContent = time(view.from + part * (view.to - view.from));
    });
  }

  function zoom(from, to) {
    var span = Math.min(Math.max(to - from, 500), data.span_ns);
    var start = Math.min(Math.max(from, 0), data.span_ns - span);
    view = { from: start, to: start + span };
    redraw();
  }

  function choose(one, index) {
    sides.forEach(function (other) { if (other !== one) other.chosen = -1; });
    one.chosen = index;
    if (index < 0) { note.textContent = ""; redraw(); return; }
    var start = one.planes.start[index], length = one.planes.duration[index], kernel = one.side.kernels[one.planes.name[index]];
    if (start < view.from || start + length > view.to) {
      var span = Math.max(view.to - view.from, length * 1.2);
      zoom(start + length / 2 - span / 2, start + length / 2 + span / 2);
    }
    note.textContent = one.side.label + ", " + (index + 1) + " of " + one.planes.start.length + ": " + kernel[0] + " (" + kernel[1] + "), " +
      time(length) + " at " + time(start) + (one.pinned ? ", pinned" : "");
    redraw();
  }

  function listen(one) {
    var canvas = one.canvas, planes = one.planes, drag = null;
    function nsAt(event) {
      var box = canvas.getBoundingClientRect();
      return view.from + (event.clientX - box.left) / box.width * (view.to - view.from);
    }
    function under(ns) {
      for (var i = firstAfter(planes, ns) - 1, seen = 0; i >= 0 && seen < 64; i -= 1, seen += 1) {
        if (planes.start[i] + planes.duration[i] >= ns) return i;
      }
      return -1;
    }
    canvas.addEventListener("pointerdown", function (event) { drag = nsAt(event); });
    canvas.addEventListener("pointermove", function (event) {
      if (drag === null && !one.pinned) choose(one, under(nsAt(event)));
    });
    canvas.addEventListener("pointerleave", function () { if (drag === null && !one.pinned && document.activeElement !== canvas) choose(one, -1); });
    canvas.addEventListener("pointerup", function (event) {
      var to = nsAt(event), from = drag;
      drag = null;
      if (from === null) return;
      var box = canvas.getBoundingClientRect();
      if (Math.abs(to - from) / (view.to - view.from) * box.width > 6) zoom(Math.min(from, to), Math.max(from, to));
      else { one.pinned = !one.pinned; choose(one, under(to)); }
    });
    canvas.addEventListener("dblclick", function () { one.pinned = false; zoom(0, data.span_ns); });
    canvas.addEventListener("keydown", function (event) {
      var middle = one.chosen >= 0 ? planes.start[one.chosen] : (view.from + view.to) / 2, span = view.to - view.from;
      if (event.key === "ArrowRight") choose(one, Math.min(one.chosen < 0 ? firstAfter(planes, view.from) : one.chosen + 1, planes.start.length - 1));
      else if (event.key === "ArrowLeft") choose(one, Math.max(one.chosen - 1, 0));
      else if (event.key === "+" || event.key === "=") zoom(middle - span / 4, middle + span / 4);
      else if (event.key === "-") zoom(middle - span, middle + span);
      else if (event.key === "Home") zoom(0, data.span_ns);
      else if (event.key === "Enter") { one.pinned = !one.pinned; choose(one, one.chosen); }
      else if (event.key === "Escape") { one.pinned = false; choose(one, -1); }
      else return;
      event.preventDefault();
    });
  }

  var boxes = root.querySelectorAll(".strip");
  Promise.all(data.sides.map(unpack)).then(function (all) {
    all.forEach(function (planes, at) { begin(boxes[at], data.sides[at], planes); });
    redraw();
    root.setAttribute("data-ready", "");
    addEventListener("resize", redraw);
    new MutationObserver(redraw).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  }).catch(function () { /* the drawing that is already there stays */ });
})();
