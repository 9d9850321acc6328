// Polls a value while its part of the page is shown.

export function watched(work, every) {
  let timer = null;
  let going = false;
  let busy = null;
  async function now() {
    clearTimeout(timer);
    busy ??= Promise.resolve(work()).catch(() => {}).finally(() => (busy = null)); // that the server is gone is said elsewhere
    await busy;
    clearTimeout(timer);
    if (going) timer = setTimeout(() => (document.hidden ? again() : now()), every);
  }
  function again() {
    document.addEventListener("visibilitychange", () => going && now(), { once: true });
  }
  return {
    now,
    start() {
      going = true;
      now();
    },
    stop() {
      going = false;
      clearTimeout(timer);
    },
  };
}
