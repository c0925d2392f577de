-- Drop the blocks of an engine's epochs up to one. The epoch stays as a fence against late writes.
--
-- ARGV  1 engine, 2 epoch.  Returns whether anything was dropped.
local engine, epoch = ARGV[1], tonumber(ARGV[2])
local o = load_owner(engine)
if not o or o.epoch > epoch then return 0 end
local dropped = (o.token ~= NONE or o.pending ~= NONE) and 1 or 0
o.token, o.pending, o.part = drop_token(o.token), drop_token(o.pending), -1
o.epoch, o.sequence = math.max(o.epoch, epoch), 0
save_owner(engine, o)
return dropped
