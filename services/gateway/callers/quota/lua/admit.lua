-- Admit one more request. All quotas of all scopes are checked before any of them is charged.
--
-- KEYS: per scope its bucket (hash) and its leases (sorted set, member request id, score expiry);
--   last the tenant's owners (hash, request id to the gateway that runs it).
-- ARGV: gateway, request id, lease in seconds, tokens to reserve, whether the id must be unique;
--   then per scope requests per minute, tokens per minute, concurrency ("" is no limit).
-- Returns {verdict, scope, wait in seconds, then per scope requests left and tokens left}.
-- Verdicts: ok, requests_per_min, tokens_per_min, concurrency, duplicate.
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1e6
local gateway, id, lease, wanted = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local scopes = (#KEYS - 1) / 2
local owners = KEYS[#KEYS]

local function level(key, name, limit)
  local got = redis.call('HMGET', key, name, name .. '_at')
  if not got[1] then return limit end
  return math.min(limit, tonumber(got[1]) + math.max(0, now - tonumber(got[2])) * limit / 60)
end

local function text(number) return string.format('%.6f', number) end

local first = {}
for i = 1, scopes do
  local leases = KEYS[2 * i]
  if i == 1 then
    for _, gone in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now)) do
      redis.call('HDEL', owners, gone)
    end
  end
  redis.call('ZREMRANGEBYSCORE', leases, '-inf', now)
end

local owner = redis.call('HGET', owners, id)
if ARGV[5] == '1' and owner and owner ~= gateway then
  local expiry = redis.call('ZSCORE', KEYS[2], id)
  if expiry then return {'duplicate', '1', text(tonumber(expiry) - now)} end
end

local answer = {'ok', '0', '0'}
local takes = {}
for i = 1, scopes do
  local bucket, leases = KEYS[2 * i - 1], KEYS[2 * i]
  local at = 5 + 3 * (i - 1)
  local rpm, tpm, most = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local left_requests, left_tokens, need = '', '', 0
  local refused, wait
  if most and redis.call('ZCARD', leases) >= most and not redis.call('ZSCORE', leases, id) then
    refused, wait = 'concurrency', 0
  end
  if rpm then
    local have = level(bucket, 'requests', rpm)
    if have < 1 then refused, wait = 'requests_per_min', (1 - have) * 60 / rpm end
    takes[#takes + 1] = {bucket, 'requests', have - 1}
    left_requests = have
  end
  if tpm then
    local have = level(bucket, 'tokens', tpm)
    need = math.min(math.max(wanted, 1), tpm)
    if have < need then refused, wait = 'tokens_per_min', (need - have) * 60 / tpm end
    takes[#takes + 1] = {bucket, 'tokens', have - need}
    left_tokens = have
  end
  if refused and answer[1] == 'ok' then answer[1], answer[2], answer[3] = refused, tostring(i), text(wait) end
  answer[#answer + 1] = left_requests
  answer[#answer + 1] = left_tokens
  first[i] = need
end

local admitted = answer[1] == 'ok'
for i = 1, scopes do
  local r, t = 2 + 2 * i, 3 + 2 * i
  if answer[r] ~= '' then answer[r] = text(answer[r] - (admitted and 1 or 0)) end
  if answer[t] ~= '' then answer[t] = text(answer[t] - (admitted and first[i] or 0)) end
end
if not admitted then return answer end

for _, take in ipairs(takes) do
  redis.call('HSET', take[1], take[2], text(take[3]), take[2] .. '_at', text(now))
  redis.call('EXPIRE', take[1], 3600)
end
for i = 1, scopes do
  redis.call('ZADD', KEYS[2 * i], now + lease, id)
  redis.call('EXPIRE', KEYS[2 * i], math.ceil(lease) + 60)
end
redis.call('HSET', owners, id, gateway)
redis.call('EXPIRE', owners, math.ceil(lease) + 60)
return answer
