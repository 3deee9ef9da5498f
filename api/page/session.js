// The user's token, and requests that carry it. The token is only in sessionStorage and in the
// Authorization header. There is no cookie, so no other site can make this browser send it.

const KEY = "kvxfer.token";

// An answer that is an error: a problem document, or what there is of one.
export class Refused extends Error {
  constructor(status, problem) {
    super(problem.detail ?? `the control plane answered HTTP ${status}`);
    this.status = status;
    this.code = problem.code ?? "";
  }
}

export class Session {
  #token = sessionStorage.getItem(KEY) ?? "";
  caller = null;

  get hasToken() {
    return this.#token !== "";
  }

  get mayAct() {
    return this.caller !== null && this.caller.scopes.includes("admin");
  }

  get mayLook() {
    return this.mayAct || (this.caller !== null && this.caller.scopes.includes("monitor"));
  }

  // Takes a token for this tab, or the one that it has, and asks whose it is. Throws Refused.
  async begin(token = this.#token) {
    this.#token = token;
    this.caller = await (await this.request("/v1/caller")).json();
    if (!this.mayLook) {
      const scopes = this.caller.scopes.join(", ");
      throw new Refused(403, {
        code: "forbidden",
        detail: `this token is for ${scopes}; the page takes one with scope monitor or admin`,
      });
    }
    if (token) sessionStorage.setItem(KEY, token);
  }

  end() {
    this.#token = "";
    this.caller = null;
    sessionStorage.removeItem(KEY);
  }

  // The answer. Throws Refused for an error, and TypeError if there is no answer.
  async request(path, { body, signal } = {}) {
    const headers = {};
    if (this.#token) headers.Authorization = `Bearer ${this.#token}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const answer = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
    });
    if (answer.ok) return answer;
    throw new Refused(answer.status, await answer.json().catch(() => ({})));
  }
}
