"""What runs in Redis, in Lua: each script is one step for everybody. Times are microseconds on the server's clock.

KEYS of both: the requests' and the tokens' bucket (when each is full again, and the limit a minute that this is counted at; no
key: now), and the set of what is running (rids, their scores the ms until when they count). A script returns the debts, as
`ingress.gcra` has them, and how many are running. At a limit that was raised what is owed takes less time, in proportion; one
that was lowered keeps nobody out for longer.
"""

_COMMON = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local now_ms = math.floor(now / 1000)
local function debt(key, least, limit)
  local full, before = string.match(redis.call('GET', key) or '', '^(%d+):(%d+)$')
  local due = full and (tonumber(full) - now) * math.min(1, tonumber(before) / limit) or 0
  return math.max(due, tonumber(least), 0)
end
local function put(key, due, limit)
  if due < 1 then
    redis.call('DEL', key)
  else
    local value = string.format('%.0f:%.0f', now + due, limit)
    redis.call('SET', key, value, 'PX', string.format('%.0f', math.ceil(due / 1000) + 1))
  end
end
local function hold(first, lease)
  for i = first, #ARGV do redis.call('ZADD', KEYS[3], string.format('%.0f', now_ms + lease), ARGV[i]) end
  if first <= #ARGV then redis.call('PEXPIRE', KEYS[3], lease) end
end
"""

# ARGV: burst, cost in requests, cost in tokens (0: no such limit), the most that may run (0: no limit), lease in ms,
# least debts (what this ingress gave while Redis was away), the limits a minute (1: none), rids. Returns which limit refuses
# (0: none; 1 requests, 2 tokens, 3 running), the debts after it, how many ran before, and in which time it would be granted
# (0: not known).
TAKE = (
    _COMMON
    + """
local burst, requests_cost, tokens_cost = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local slots, lease = tonumber(ARGV[4]), tonumber(ARGV[5])
local requests_limit, tokens_limit = tonumber(ARGV[8]), tonumber(ARGV[9])
local requests = requests_cost > 0 and debt(KEYS[1], ARGV[6], requests_limit) or 0
local tokens, running = tokens_cost > 0 and debt(KEYS[2], ARGV[7], tokens_limit) or 0, 0
local requests_late = requests_cost > 0 and requests + math.min(requests_cost, burst) - burst or 0
local tokens_late = tokens_cost > 0 and tokens + math.min(tokens_cost, burst) - burst or 0
if slots > 0 then
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', string.format('%.0f', now_ms))
  running = redis.call('ZCARD', KEYS[3])
end
local refused, late = 0, 0
if requests_late > 1 then
  refused, late = 1, requests_late
elseif tokens_late > 1 then
  refused, late = 2, tokens_late
elseif slots > 0 and running + math.min(#ARGV - 9, slots) > slots then
  refused = 3
else
  requests, tokens = requests + requests_cost, tokens + tokens_cost
  if slots > 0 then hold(10, lease) end
end
if requests_cost > 0 then put(KEYS[1], requests, requests_limit) end
if tokens_cost > 0 then put(KEYS[2], tokens, tokens_limit) end
return {refused, math.ceil(requests), math.ceil(tokens), running, math.ceil(late)}
"""
)

# ARGV: what to add to the debts (negative: given back), lease in ms, the limits, how many rids run no longer, these, rids that
# still run.
SETTLE = (
    _COMMON
    + """
for i, delta in ipairs({tonumber(ARGV[1]), tonumber(ARGV[2])}) do
  local limit = tonumber(ARGV[3 + i])
  if delta ~= 0 then put(KEYS[i], math.max(0, debt(KEYS[i], 0, limit) + delta), limit) end
end
local over = tonumber(ARGV[6])
for i = 7, 6 + over do redis.call('ZREM', KEYS[3], ARGV[i]) end
hold(7 + over, tonumber(ARGV[3]))
return {0, 0, 0, 0, 0}
"""
)
