-- ARGV: [5] id, [6] microseconds that it may take, [7] secret. Returns the member and its spec.
local id, lasts = ARGV[5], tonumber(ARGV[6])

local member = member_of(id)
if not member then
  return {'unknown-instance'}
end
local refused = refused_secret(id, member, ARGV[7])
if refused then
  return refused
end
member.state = 'draining'
member.drain_deadline = (now + lasts) / 1000000
save(id, member)
change('state-changed', id, member)
return {'ok', cmsgpack.pack(member), redis.call('HGET', SPECS, id)}
