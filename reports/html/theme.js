(function () {
  "use strict";
  var root = document.documentElement;
  root.classList.add("js");
  try {
    var chosen = localStorage.getItem("fusion-advisor-theme");
    if (chosen === "dark" || chosen === "light") root.setAttribute("data-theme", chosen);
  } catch (blocked) { /* no storage: the system's theme stays */ }
})();
