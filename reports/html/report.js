(function () {
  "use strict";
  var root = document.documentElement;

  // theme: the system's until the reader chooses
  var themeButton = document.getElementById("theme");
  function isDark() {
    var chosen = root.getAttribute("data-theme");
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }
  function nameTheme() { themeButton.textContent = isDark() ? "Light theme" : "Dark theme"; }
  nameTheme();
  themeButton.addEventListener("click", function () {
    var next = isDark() ? "light" : "dark";
    root.setAttribute("data-theme", next);
    try { localStorage.setItem("fusion-advisor-theme", next); } catch (blocked) { /* stays for this view */ }
    nameTheme();
  });

  // the report's own data, as a file
  var save = document.getElementById("save-json");
  if (save) save.addEventListener("click", function () {
    var text = document.getElementById("report-json").textContent;
    var link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    link.download = "report.json";
    link.click();
    setTimeout(function () { URL.revokeObjectURL(link.href); }, 1000);
  });

  // what to do next, as text to paste; without a clipboard it is selected
  document.querySelectorAll("[data-copy]").forEach(function (button) {
    button.addEventListener("click", function () {
      var source = document.getElementById(button.getAttribute("data-copy"));
      function select() { getSelection().selectAllChildren(source); button.textContent = "Selected"; }
      if (!navigator.clipboard) { select(); return; }
      navigator.clipboard.writeText(source.textContent).then(function () { button.textContent = "Copied"; }, select);
    });
  });

  // tables that sort: numbers by data-v, words by their text
  function keyOf(row, column) {
    var cell = row.cells[column];
    var value = cell.getAttribute("data-v");
    return value === null ? cell.textContent.trim().toLowerCase() : Number(value);
  }
  document.querySelectorAll("table.sortable").forEach(function (table) {
    var body = table.tBodies[0];
    Array.prototype.forEach.call(table.tHead.rows[0].cells, function (head, column) {
      var button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.textContent = "";
      head.appendChild(button);
      button.addEventListener("click", function () {
        var isDown = head.getAttribute("aria-sort") === "descending";
        var first = keyOf(body.rows[0], column);
        var descending = head.hasAttribute("aria-sort") ? !isDown : typeof first === "number" && head.classList.contains("n");
        Array.prototype.forEach.call(table.tHead.rows[0].cells, function (other) { other.removeAttribute("aria-sort"); });
        head.setAttribute("aria-sort", descending ? "descending" : "ascending");
        Array.prototype.slice.call(body.rows).sort(function (a, b) {
          var left = keyOf(a, column), right = keyOf(b, column);
          var order = left < right ? -1 : left > right ? 1 : 0;
          return descending ? -order : order;
        }).forEach(function (row) { body.appendChild(row); });
      });
    });
  });

  // filter of the kernel table: words, and categories of which any may fit
  var filter = document.getElementById("filter");
  if (filter) {
    var chips = Array.prototype.slice.call(document.querySelectorAll(".chip"));
    var count = document.getElementById("filter-count"), whole = count.textContent;
    var sieve = function () {
      var wanted = filter.value.trim().toLowerCase();
      var pressed = chips.filter(function (chip) { return chip.getAttribute("aria-pressed") === "true"; })
        .map(function (chip) { return chip.getAttribute("data-category"); });
      var rows = document.getElementById("kernel-table").tBodies[0].rows;
      var shown = 0;
      Array.prototype.forEach.call(rows, function (row) {
        var fits = row.textContent.toLowerCase().indexOf(wanted) !== -1 &&
          (!pressed.length || pressed.indexOf(row.getAttribute("data-category")) !== -1);
        row.hidden = !fits;
        if (fits) shown += 1;
      });
      count.textContent = wanted || pressed.length ? shown + " of " + rows.length + " kernel names." : whole;
    };
    filter.addEventListener("input", sieve);
    chips.forEach(function (chip) {
      chip.addEventListener("click", function () {
        chip.setAttribute("aria-pressed", String(chip.getAttribute("aria-pressed") !== "true"));
        sieve();
      });
    });
  }

  // a link into a folded card opens it
  function unfold() {
    var target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    var wasClosed = false;
    for (var card = target.closest("details"); card; card = card.parentElement.closest("details")) {
      wasClosed = wasClosed || !card.open;
      card.open = true;
    }
    if (wasClosed) target.scrollIntoView();
  }
  addEventListener("hashchange", unfold);
  unfold();

  // where in the page the reader is
  var links = new Map();
  document.querySelectorAll("nav a").forEach(function (link) { links.set(link.getAttribute("href").slice(1), link); });
  var watcher = new IntersectionObserver(function (entries) {
    entries.forEach(function (entry) {
      if (!entry.isIntersecting) return;
      links.forEach(function (link) { link.removeAttribute("aria-current"); });
      links.get(entry.target.id).setAttribute("aria-current", "true");
    });
  }, { rootMargin: "0px 0px -75% 0px" });
  document.querySelectorAll("main > section").forEach(function (part) { if (links.has(part.id)) watcher.observe(part); });

  // a printed page cannot unfold anything
  addEventListener("beforeprint", function () {
    document.querySelectorAll("details").forEach(function (item) { item.open = true; });
  });
})();
