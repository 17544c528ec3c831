/* Search runs in a worker, and browsers start none from file:// addresses. There, run its script in a hidden frame. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html><html><head></head><body></body></html>";
      this.ready = new Promise((resolve, reject) => {
        frame.onload = () => {
          const scope = frame.contentWindow;
          // In a worker, postMessage sends to the page.
          scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          // The search awaits it: scripts load one after the other.
          scope.importScripts = (...urls) => urls.reduce((loaded, each) => loaded.then(() => load(each)), Promise.resolve());
          const load = (each) =>
            new Promise((done, failed) => {
              const script = scope.document.createElement("script");
              script.src = each;
              script.onload = done;
              script.onerror = failed;
              scope.document.body.append(script);
            });
          load(new URL(url, location.href).href).then(() => resolve(scope), reject);
        };
      });
      document.documentElement.append(frame);
      this.frame = frame;
    }
    postMessage(data) {
      this.ready.then((scope) => scope.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
